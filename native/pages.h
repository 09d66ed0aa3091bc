// Paged memory with any strides: token p of a sequence lies at [table[p / page_size], p % page_size].
#pragma once

#include <cstdint>

namespace longspan {

template <class T>
struct Pages {
  T* data;
  int64_t page_stride, row_stride;  // in elements
  int64_t page_size;                // tokens

  T* row(int64_t page, int64_t offset) const { return data + page * page_stride + offset * row_stride; }
  T* row(const int64_t* table, int64_t position) const {
    return row(table[position / page_size], position % page_size);
  }
  T* slot(int64_t slot) const { return row(slot / page_size, slot % page_size); }
};

}  // namespace longspan
