// Kimi Delta Attention of one layer, from the normalised hidden to what is added to the residual.
//
//     q, k, v, b, forget, gate = projections of x;  y = gated norm of the recurrence over them;  out = output y
//
// Segment by segment of the rows, four stages: products with x; the second halves of the low ranks; the recurrence,
// shared out by sequence and head; the product with y. Rows go in chunks, at most kRecurrent that are left token by
// token, so a prompt cut at multiples of the chunk keeps its bits; in float32 all go token by token, and any cut does.
// A sequence without context starts from zeros, one without rows is left alone.
#include "kda_recurrence.h"
#include "workspace.h"

namespace longspan {

namespace {

constexpr int64_t kRecurrent = 8;
static_assert(Segment::kCut % KdaChunk<float>::kChunk == 0, "batch mates must not move the chunks of a sequence");

// rows [count][dim] -> [count][width], zeros at the end.
std::vector<float> widened(const float* x, int64_t count, int64_t dim, int64_t width) {
  std::vector<float> out(count * width);
  for (int64_t r = 0; r < count; ++r) std::copy(x + r * dim, x + (r + 1) * dim, out.begin() + r * width);
  return out;
}

const float* floats(const Vector& v, int64_t size) {
  if (v.dtype != Dtype::float32 || v.size != size) throw std::invalid_argument("a float32 vector was expected");
  return v.data<float>();
}

}  // namespace

Kda::Kda(Tensor q, Tensor k, Tensor v, Tensor forget_a, Tensor forget_b, Tensor beta, Tensor gate,
         std::optional<Tensor> gate_b, Tensor output, Tensor conv, Tensor a_log, Tensor dt_bias, Tensor output_norm,
         std::optional<float> lower_bound, float norm_eps)
    : q(std::move(q)),
      k(std::move(k)),
      v(std::move(v)),
      forget_a(std::move(forget_a)),
      forget_b(std::move(forget_b)),
      beta(std::move(beta)),
      gate(std::move(gate)),
      output(std::move(output)),
      heads(this->beta.rows),
      dim(this->q.rows / heads),
      width((dim + kLanes - 1) / kLanes * kLanes),
      lower_bound(lower_bound),
      norm_eps(norm_eps) {
  if (gate_b) this->gate_b.emplace(std::move(*gate_b));
  const Weight filters(std::move(conv));
  const int64_t inner = heads * dim, kernel = filters.cols;
  if (filters.dtype != Dtype::float32 || filters.rows != 3 * inner)
    throw std::invalid_argument("conv: float32 [3 * heads * dim, kernel] was expected");
  history = kernel - 1;
  taps.resize(heads * kernel * 3 * width);
  for (int64_t channel = 0; channel < 3 * inner; ++channel)
    for (int64_t j = 0; j < kernel; ++j) {
      const int64_t part = channel / inner, head = channel % inner / dim, i = channel % dim;
      taps[((head * kernel + j) * 3 + part) * width + i] = filters.data<float>()[channel * filters.stride + j];
    }
  this->dt_bias = widened(floats(Vector(std::move(dt_bias)), inner), heads, dim, width);
  this->output_norm = widened(floats(Vector(std::move(output_norm)), dim), 1, dim, width);
  const Vector log_rates(std::move(a_log));
  for (int64_t h = 0; h < heads; ++h) rate.push_back(std::exp(floats(log_rates, heads)[h]));
}

namespace {

// What one thread needs to walk over heads.
template <class T>
struct HeadScratch {
  HeadRows rows;
  float *o, *raw, *chunk, *state;

  static constexpr int64_t kRows = KdaChunk<T>::kChunk;
  static int64_t size(const Kda& w) {
    return 5 * kRows * w.width + kRows + KdaInput<T>::scratch(w) + KdaChunk<T>::scratch(w.width) + w.width * w.width;
  }
  HeadScratch(const Kda& w, float* memory) {
    const auto take = [&](float*& array, int64_t count) {
      array = memory;
      memory += count;
    };
    take(rows.q, kRows * w.width);
    take(rows.k, kRows * w.width);
    take(rows.v, kRows * w.width);
    take(rows.decay, kRows * w.width);
    take(o, kRows * w.width);
    take(rows.beta, kRows);
    take(raw, KdaInput<T>::scratch(w));
    take(chunk, KdaChunk<T>::scratch(w.width));
    take(state, w.width * w.width);
  }
};

// rows [dim][dim] -> the same, or turned.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) std::copy(from + i * from_stride, from + i * from_stride + dim, to + i * to_stride);
}
void turn_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes)
    for (int64_t j = 0; j < dim; j += kLanes) {
      Floats tile[kLanes] = {};
      const int64_t rows = std::min<int64_t>(kLanes, dim - i), columns = std::min<int64_t>(kLanes, dim - j);
      for (int64_t r = 0; r < rows; ++r) tile[r] = load_rest(from + (i + r) * from_stride + j, columns);
      transpose(tile);
      for (int64_t c = 0; c < columns; ++c) store_rest(to + (j + c) * to_stride + i, tile[c], rows);
    }
}

template <class T>
void run_head(const Kda& w, const KdaRows<T>& rows, const KdaMemory& memory, const Batch& batch, Piece piece,
              int64_t origin, int64_t head, HeadScratch<T> scratch) {
  const int64_t dim = w.dim, width = w.width, slot = batch.state_slots[piece.seq];
  const int64_t first = piece.first - origin, count = piece.count;
  const bool begins = batch.context_lens[piece.seq] == 0 && piece.first == batch.query_starts[piece.seq];
  const KdaWindow<T> window{at<T>(memory.window) + slot * memory.window_slot + head * dim * memory.window_channel,
                            memory.window_row, memory.window_channel};
  float* home = at<float>(memory.state) + slot * memory.state_slot + head * memory.state_head;

  // A state of whole vectors is worked on where it lies, if values of a key are neighbours there.
  const bool turned = memory.state_value != 1, in_place = dim == width && !turned;
  const HeadState s = in_place ? HeadState{home, memory.state_key} : HeadState{scratch.state, width};
  if (!in_place) std::fill(s.data, s.data + width * width, 0.0f);
  if (begins)
    for (int64_t i = 0; i < dim; ++i) std::fill(s.data + i * s.stride, s.data + i * s.stride + dim, 0.0f);
  else if (turned)
    turn_rows(home, memory.state_value, s.data, s.stride, dim);
  else if (!in_place)
    copy_rows(home, memory.state_key, s.data, s.stride, dim);

  KdaInput<T> input(w, rows, head, first, window, begins, scratch.raw);
  const HeadRows& r = scratch.rows;
  constexpr bool exact = std::is_same_v<T, float>;
  // The norm over a narrow head magnifies what bfloat16 factors lose where o is small.
  const bool narrow = dim < kLanes;
  KdaChunk<T> chunk(width, scratch.chunk);
  for (int64_t done = 0; done < count; done += chunk.kChunk) {
    const int64_t n = std::min(chunk.kChunk, count - done);
    input.read(n, r);
    if (exact || narrow || n <= kRecurrent)
      kda_recur(dim, width, n, r, s, scratch.o);
    else if constexpr (!exact)
      chunk.run(n, r, s, scratch.o);
    kda_output(w, rows, head, first + done, n, scratch.o);
  }
  input.save();
  if (turned)
    turn_rows(s.data, s.stride, home, memory.state_value, dim);
  else if (!in_place)
    copy_rows(s.data, s.stride, home, memory.state_key, dim);
}

template <class T>
void run(const Kda& w, const KdaMemory& memory, const Batch& batch, const T* x, T* out) {
  const int64_t hidden = w.q.cols, inner = w.heads * w.dim;
  const int64_t forget_rank = w.forget_a.rows, gate_rank = w.gate_b ? w.gate.rows : 0;
  const int64_t most = std::min(batch.tokens, Segment::kRows);
  Workspace workspace;
  const KdaRows<T> rows{inner,
                        workspace.take<T>(most * 3 * inner),
                        workspace.take<T>(most * inner),
                        workspace.take<T>(most * w.heads),
                        workspace.take<T>(most * inner),
                        workspace.take<T>(most * inner)};
  T* low_forget = workspace.take<T>(most * forget_rank);
  T* low_gate = workspace.take<T>(most * gate_rank);
  const int64_t scratch_size = HeadScratch<T>::size(w);
  const auto threads = pool();
  float* scratch = workspace.take<float>(threads->size() * scratch_size);

  threads->run([&](Team& team) {
    const HeadScratch<T> mine(w, scratch + team.rank * scratch_size);
    for (const Segment& segment : batch.segments) {
      const int64_t m = segment.count;
      const T* in = x + segment.first * hidden;
      // Writes nothing that the last stage of the segment before still reads.
      multiply<T, T>(team, m,
                     {{in, hidden, w.q, rows.qkv, 3 * inner},
                      {in, hidden, w.k, rows.qkv + inner, 3 * inner},
                      {in, hidden, w.v, rows.qkv + 2 * inner, 3 * inner},
                      {in, hidden, w.gate, w.gate_b ? low_gate : rows.gate, w.gate.rows},
                      {in, hidden, w.forget_a, low_forget, forget_rank},
                      {in, hidden, w.beta, rows.beta, w.heads}});
      team.barrier();
      multiply<T, T>(team, m, {{low_forget, forget_rank, w.forget_b, rows.forget, inner}});
      if (w.gate_b) multiply<T, T>(team, m, {{low_gate, gate_rank, *w.gate_b, rows.gate, inner}});
      team.barrier();
      team.claim(int64_t(segment.pieces.size()) * w.heads, 1, [&](int64_t unit, int64_t) {
        run_head(w, rows, memory, batch, segment.pieces[unit / w.heads], segment.first, unit % w.heads, mine);
      });
      team.barrier();
      multiply<T, T>(team, m, {{rows.y, inner, w.output, out + segment.first * w.output.rows, w.output.rows}});
    }
  });
}

void kda(const Kda& weights, const KdaMemory& memory, const Batch& batch, Address x, Address out) {
  if (!batch.tokens) return;
  with_dtype(weights.q.dtype, [&]<class T>(T) { run(weights, memory, batch, at<const T>(x), at<T>(out)); });
}

}  // namespace

void bind_kda(nb::module_& m) {
  nb::class_<Kda>(m, "Kda").def(
      nb::init<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, Tensor, Tensor, Tensor,
               Tensor, Tensor, std::optional<float>, float>(),
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
  nb::class_<KdaMemory>(m, "KdaMemory")
      .def("__init__", [](KdaMemory* memory, Address state, int64_t slot, int64_t head, int64_t key, int64_t value,
                          Address window, int64_t window_slot, int64_t window_row, int64_t window_channel) {
        new (memory) KdaMemory{state, window, slot, head, key, value, window_slot, window_row, window_channel};
      });
  m.def("kda", &kda, Unlocked());
}

}  // namespace longspan
