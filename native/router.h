// Which experts a token goes to, and with what weight, from its logits. All in float32.
//
//     s = sigmoid(logits)               choice = s + bias                 the bias only chooses
//     groups (if fewer are kept than there are): score = sum of the two largest choices; others' choices = -inf
//     I = top-k of choice               w = s_I;  w = w / (sum w + 1e-20) if renormalised;  w = w * factor
//
// Ties go to the lower expert; NaN ranks last, as -inf. Experts of a token are listed ascending.
#pragma once

#include <algorithm>

#include "linear.h"
#include "math.h"
#include "workspace.h"

namespace longspan {

// The k <= n best of n scores -> their indices, ascending.
inline void top_k(const float* scores, int n, int k, int64_t* best) {
  const auto rank = [&](int64_t i) { return scores[i] == scores[i] ? scores[i] : -INFINITY; };
  int found = 0;
  for (int64_t i = 0; i < n; ++i) {  // `best` is kept in order, best first; equal scores stay in order of i
    const float score = rank(i);
    if (found == k && (k == 0 || !(score > rank(best[k - 1])))) continue;
    int at = found < k ? found++ : k - 1;
    for (; at > 0 && score > rank(best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = i;
  }
  std::sort(best, best + k);
}

struct Router {
  static constexpr int kMostChosen = 1024;

  Weight gate;  // [experts, hidden]
  Vector bias;  // [experts] float
  int chosen;   // of each token
  int groups, kept_groups;
  bool renormalize;
  float factor;

  Router(Tensor gate, Tensor bias, int chosen, int groups, int kept_groups, bool renormalize, float factor)
      : gate(std::move(gate)),
        bias(std::move(bias)),
        chosen(chosen),
        groups(groups),
        kept_groups(kept_groups),
        renormalize(renormalize),
        factor(factor) {
    if (chosen > kMostChosen) throw std::invalid_argument("a token may choose 1024 experts at most");
  }

  int experts() const { return int(gate.rows); }

  // logits [experts], overwritten -> the experts [chosen] of a token and their weights.
  void choose(float* logits, int64_t* picked, float* weights) const {
    const int n = experts();
    Workspace workspace;
    auto* choice = workspace.take<float>(n);
    float* scores = logits;
    const float* offset = bias.data<float>();
    int e = 0;
    for (; e + kLanes <= n; e += kLanes) {
      const Floats s = sigmoid(load(logits + e));
      store(scores + e, s);
      store(choice + e, s + load(offset + e));
    }
    if (const int rest = n - e) {
      const Floats s = sigmoid(load_part(logits + e, rest));
      store_part(scores + e, s, rest);
      store_part(choice + e, s + load_part(offset + e, rest), rest);
    }
    if (groups > kept_groups) drop_groups(choice);
    top_k(choice, n, chosen, picked);
    float total = 1e-20f;
    for (int i = 0; i < chosen; ++i) total += weights[i] = scores[picked[i]];
    const float scale = renormalize && chosen > 1 ? total : 1.0f;
    for (int i = 0; i < chosen; ++i) weights[i] = weights[i] / scale * factor;
  }

 private:
  void drop_groups(float* choice) const {
    const int size = experts() / groups;
    Workspace workspace;
    auto* best_two = workspace.take<float>(groups);
    auto* kept = workspace.take<int64_t>(kept_groups);
    for (int g = 0; g < groups; ++g) {
      float best = -INFINITY, second = -INFINITY;
      bool nan = false;
      for (const float* c = choice + g * size; c < choice + (g + 1) * size; ++c) {
        nan |= *c != *c;
        if (*c > best)
          second = best, best = *c;
        else if (*c > second)
          second = *c;
      }
      best_two[g] = nan ? NAN : size > 1 ? best + second : best;
    }
    top_k(best_two, groups, kept_groups, kept);
    for (int g = 0, next = 0; g < groups; ++g) {
      if (next < kept_groups && kept[next] == g)
        ++next;
      else
        std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
    }
  }
};

}  // namespace longspan
