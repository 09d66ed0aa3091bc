// Scratch memory of the calling thread: planned by use, kept between calls, never shared.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace longspan {

// One per operator call, on the stack: hands out 64-byte aligned arrays that live until it ends. After the
// first few calls no call allocates. Contents are undefined. Take arrays before the parallel region begins
// or inside it per thread: the workspace of a thread of the pool is its own.
class Workspace {
 public:
  Workspace() : mark_(arena().used) {}
  ~Workspace() { arena().release(mark_); }
  Workspace(const Workspace&) = delete;

  template <class T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(arena().take(size_t(count) * sizeof(T)));
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Arena {
    std::unique_ptr<char, Free> block;
    size_t size = 0, used = 0;
    std::vector<std::unique_ptr<char, Free>> spilled;  // what did not fit; the block grows when all is free
    size_t wanted = 0;

    static char* allocate(size_t bytes) {
      char* p = static_cast<char*>(std::aligned_alloc(64, bytes));
      if (!p) throw std::bad_alloc();
      return p;
    }
    char* take(size_t bytes) {
      bytes = (bytes + 127) / 64 * 64;  // a little apart: no two threads' arrays share a line
      used += bytes;
      if (used > wanted) wanted = used;
      if (used <= size) return block.get() + used - bytes;
      spilled.emplace_back(allocate(bytes));
      return spilled.back().get();
    }
    void release(size_t mark) {
      used = mark;
      if (mark) return;
      spilled.clear();
      if (wanted > size) {
        block.reset(allocate(wanted));
        size = wanted;
      }
    }
  };
  static Arena& arena() {
    thread_local Arena arena;
    return arena;
  }
  size_t mark_;
};

}  // namespace longspan
