// The version of the library, from the macros of the header it was built with.
#include "fovea/version.h"

#define FOVEA_TEXT_OF(x) #x
#define FOVEA_TEXT(x) FOVEA_TEXT_OF(x)

namespace fovea {

const char* version() {
  return FOVEA_TEXT(FOVEA_VERSION_MAJOR) "." FOVEA_TEXT(FOVEA_VERSION_MINOR) "." FOVEA_TEXT(
      FOVEA_VERSION_PATCH);
}

}  // namespace fovea
