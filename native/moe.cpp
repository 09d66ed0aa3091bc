#include "tensor.h"

namespace longspan {

void bind_moe(nb::module_&) {}

}  // namespace longspan
