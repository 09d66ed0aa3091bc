// What this machine can do at most, measured: read bandwidth and multiply-accumulate peaks on all threads.
#include <chrono>

#include "pool.h"
#include "simd.h"
#include "tensor.h"

namespace longspan {
namespace {

double seconds_of(auto&& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Streams the memory at `address` once -> GB/s. Where memory lies can matter as much as how it is read, so
// give the very bytes that the operators read, many times the caches' size.
double read_bandwidth(Address address, int64_t bytes) {
  const float* p = at<const float>(address);
  std::atomic<float> sink{0};
  const double seconds = seconds_of([&] {
    pool()->run([&](Team& team) {
      Floats sums[8] = {};
      team.claim(bytes / 512, 2048, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * 128; i < end * 128; i += 128)
          for (int j = 0; j < 8; ++j) sums[j] += load(p + i + 16 * j);
      });
      Floats all = zero();
      for (const Floats& s : sums) all += s;
      sink.store(sum(all), std::memory_order_relaxed);
    });
  });
  return double(bytes / 512 * 512) / seconds / 1e9;
}

// Independent chains of one multiply-accumulate from registers -> operations a second of all threads, in 1e9.
template <class Accumulator, class Vector>
double peak(int64_t rounds, double operations, auto&& step) {
  constexpr int kChains = 16;
  const auto threads = pool();
  const double seconds = seconds_of([&] {
    threads->run([&](Team&) {
      Accumulator acc[kChains] = {};
      Vector a{}, b{};
      // Opaque, or the compiler sees that all chains are one.
      asm volatile("" : "+v"(a), "+v"(b));
      for (int c = 0; c < kChains; ++c) asm volatile("" : "+v"(acc[c]));
      for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) acc[c] = step(acc[c], a, b);
      for (int c = 0; c < kChains; ++c) asm volatile("" : "+v"(acc[c]));
    });
  });
  return operations * kChains * double(rounds) * threads->size() / seconds / 1e9;
}

#ifdef __AVX512VNNI__
double bf16_peak(int64_t rounds) {
  return peak<Floats, Halves>(rounds, 64, [](Floats acc, Halves a, Halves b) { return dot(acc, a, b); });
}
double int8_peak(int64_t rounds) {
  return peak<__m512i, __m512i>(rounds, 128,
                                [](__m512i acc, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(acc, a, b); });
}
#else
double bf16_peak(int64_t) { return 0; }
double int8_peak(int64_t) { return 0; }
#endif

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("read_bandwidth", &read_bandwidth, nb::arg("address"), nb::arg("bytes"), Unlocked());
  m.def("bf16_peak", &bf16_peak, nb::arg("rounds") = 10'000'000, Unlocked());
  m.def("int8_peak", &int8_peak, nb::arg("rounds") = 10'000'000, Unlocked());
}

}  // namespace longspan
