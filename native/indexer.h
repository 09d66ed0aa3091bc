// What stands in a list of chosen tokens where there is none.
#pragma once

#include <cstdint>

namespace longspan {

constexpr int64_t kNoToken = -1;
constexpr int64_t kNonFinite = -2;  // first in the list of a row with a score that is not finite

}  // namespace longspan
