// The extension module: one function or class per operator, defined in the operator's own file.
#include <climits>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "activation.h"
#include "batch.h"
#include "pool.h"
#include "tensor.h"

namespace longspan {

void bind_attention_residual(nb::module_&);
void bind_candidates(nb::module_&);
void bind_ffn(nb::module_&);
void bind_indexer(nb::module_&);
void bind_kda(nb::module_&);
void bind_limits(nb::module_&);
void bind_lm_head(nb::module_&);
void bind_mla(nb::module_&);
void bind_moe(nb::module_&);
void bind_partials(nb::module_&);
void bind_sampling(nb::module_&);
void bind_sparse_attention(nb::module_&);

namespace {

// Instruction sets this processor has, of those the modules are built for.
std::vector<const char*> supported() {
  std::vector<const char*> found{"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (avx2) found.push_back("avx2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    found.push_back("avx512");
#endif
  return found;
}

// Activations of one step are as large as those of the next. Given back to the system in between, their pages
// would be faulted in again: a tenth of the time of a prefill.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

}  // namespace

NB_MODULE(LONGSPAN_MODULE, m) {
  nb::enum_<Dtype>(m, "Dtype")
      .value("float32", Dtype::float32)
      .value("bfloat16", Dtype::bfloat16);
  nb::class_<Weight>(m, "Weight").def(nb::init<Tensor>());
  nb::class_<Vector>(m, "Vector").def(nb::init<Tensor>());
  nb::class_<Activation>(m, "Activation").def(nb::init<bool, float, float>());
  nb::class_<Shard>(m, "Shard").def(nb::init<int64_t, int64_t, int64_t>());
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<int64_t, int64_t, Address, Address, Address, int64_t, Address, Address, Shard>());
  m.def("supported", &supported);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("num_threads", [] { return pool()->size(); });
  m.def("set_threads", &set_threads, nb::arg("threads"), nb::arg("cpus") = std::vector<int>{}, Unlocked());
  bind_attention_residual(m);
  bind_candidates(m);
  bind_ffn(m);
  bind_indexer(m);
  bind_kda(m);
  bind_limits(m);
  bind_lm_head(m);
  bind_mla(m);
  bind_moe(m);
  bind_partials(m);
  bind_sampling(m);
  bind_sparse_attention(m);
}

}  // namespace longspan
