// What the stages of KDA share: the weights of a layer, its memory, the projections of a step.
#pragma once

#include <optional>

#include "batch.h"
#include "linear.h"

namespace longspan {

// Arrays over the channels of a head are `width` floats, head_dim and zeros up to whole vectors, so that no
// loop between the projections has a tail.
struct Kda {
  Weight q, k, v;  // [heads * dim, hidden]
  Weight forget_a, forget_b;
  Weight beta;                   // [heads, hidden]
  Weight gate;                   // [heads * dim, hidden], or
  std::optional<Weight> gate_b;  // of low rank: gate_b gate x
  Weight output;                 // [hidden, heads * dim]
  int64_t heads, dim, width;
  int64_t history;                    // kernel - 1
  std::vector<float> taps;            // [heads][kernel][q | k | v][width]
  std::vector<float> dt_bias;         // [heads][width]
  std::vector<float> rate;            // [heads] e^A_log
  std::vector<float> output_norm;     // [width]
  std::optional<float> lower_bound;
  float norm_eps;

  Kda(Tensor q, Tensor k, Tensor v, Tensor forget_a, Tensor forget_b, Tensor beta, Tensor gate,
      std::optional<Tensor> gate_b, Tensor output, Tensor conv, Tensor a_log, Tensor dt_bias, Tensor output_norm,
      std::optional<float> lower_bound, float norm_eps);
};

// The memory of a layer: state [slots, heads, dim (key), dim (value)], of whose last two strides one is 1, and
// window [slots, kernel - 1, 3 * heads * dim] with any strides.
struct KdaMemory {
  Address state, window;
  int64_t state_slot, state_head, state_key, state_value, window_slot, window_row, window_channel;  // strides
};

// The window of one head: row j, channel i of part q, k or v at data[j * row + (part * inner + i) * channel].
template <class T>
struct KdaWindow {
  T* data;
  int64_t row, channel;
};

// Projections of all rows of a step, and what comes of them.
template <class T>
struct KdaRows {
  int64_t inner;    // heads * dim
  T* qkv;           // [tokens, 3 * inner]
  T* forget;        // [tokens, inner]
  T* beta;          // [tokens, heads]
  T* gate;          // [tokens, inner]
  T* y;             // [tokens, inner]
};

}  // namespace longspan
