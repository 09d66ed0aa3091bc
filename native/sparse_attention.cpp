#include "tensor.h"

namespace longspan {

void bind_sparse_attention(nb::module_&) {}

}  // namespace longspan
