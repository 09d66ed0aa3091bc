// Tensors from Python. Weights are held (their memory stays while the operator lives) and checked once;
// activations and cache views come with each call as addresses, which the Python side has checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "simd.h"

namespace nb = nanobind;

namespace longspan {

using Tensor = nb::ndarray<nb::ro, nb::device::cpu>;
using Address = uint64_t;

enum class Dtype { float32, bfloat16, uint8 };

inline Dtype dtype_of(const Tensor& t) {
  const auto d = t.dtype();
  if (d == nb::dtype<float>()) return Dtype::float32;
  if (d == nb::dtype<uint8_t>()) return Dtype::uint8;
  if (d.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && d.bits == 16) return Dtype::bfloat16;
  throw std::invalid_argument("a float32, bfloat16 or uint8 tensor was expected");
}

// A matrix [rows, cols] with contiguous rows.
struct Weight {
  Tensor owner;
  Dtype dtype = Dtype::float32;
  int64_t rows = 0, cols = 0, stride = 0;

  Weight() = default;
  explicit Weight(Tensor t) : owner(std::move(t)) {
    if (owner.ndim() != 2) throw std::invalid_argument("a matrix was expected");
    dtype = dtype_of(owner);
    rows = int64_t(owner.shape(0));
    cols = int64_t(owner.shape(1));
    stride = owner.stride(0);
    if (cols > 1 && owner.stride(1) != 1) throw std::invalid_argument("a matrix with contiguous rows was expected");
  }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(owner.data());
  }
};

// A contiguous vector.
struct Vector {
  Tensor owner;
  Dtype dtype = Dtype::float32;
  int64_t size = 0;

  Vector() = default;
  explicit Vector(Tensor t) : owner(std::move(t)) {
    if (owner.ndim() != 1 || (owner.shape(0) > 1 && owner.stride(0) != 1))
      throw std::invalid_argument("a contiguous vector was expected");
    dtype = dtype_of(owner);
    size = int64_t(owner.shape(0));
  }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(owner.data());
  }
};

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Calls f with a value of the element type of activations.
template <class F>
decltype(auto) with_dtype(Dtype dtype, F&& f) {
  if (dtype == Dtype::bfloat16) return f(bf16{});
  return f(float{});
}

// Releases the GIL: for every operator that computes.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

}  // namespace longspan
