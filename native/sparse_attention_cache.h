// Where cached rows lie and how a tile of them becomes rows of T: all that attention knows of a cache's format.
//
// A format names the `Cell` its rows are stored in, finds a row (`cell`), says how long it is (`bytes`, for
// the prefetch) and makes rows of T of a tile of cells (`rows`), in a scratch of its own where they must be
// decoded. Tiles are decoded once for all heads.
#pragma once

#include "pages.h"
#include "workspace.h"

namespace longspan {

// Rows in the model's own type: used where they lie.
template <class T>
struct ModelRows {
  using Cell = T;
  Pages<const T> pages;
  int64_t width;

  const T* cell(const int64_t* table, int64_t position) const { return pages.row(table, position); }
  int64_t bytes() const { return width * int64_t(sizeof(T)); }

  class Tile {
   public:
    Tile(const ModelRows&, Workspace&, int /* most rows */) {}
    const T* const* rows(const T* const* cells, int /* count */) { return cells; }
  };
};

}  // namespace longspan
