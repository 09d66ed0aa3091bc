#include "tensor.h"

namespace longspan {

void bind_kda(nb::module_&) {}

}  // namespace longspan
