#include "tensor.h"

namespace longspan {

void bind_indexer(nb::module_&) {}

}  // namespace longspan
