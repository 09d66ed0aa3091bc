#include "tensor.h"

namespace longspan {

void bind_mla(nb::module_&) {}

}  // namespace longspan
