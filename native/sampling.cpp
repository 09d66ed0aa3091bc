#include "tensor.h"

namespace longspan {

void bind_sampling(nb::module_&) {}

}  // namespace longspan
