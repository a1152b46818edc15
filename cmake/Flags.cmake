# Warnings and sanitizers of every target, as one interface library.
add_library(fovea_flags INTERFACE)
target_compile_options(fovea_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(FOVEA_SANITIZE)
  target_compile_options(fovea_flags INTERFACE -fsanitize=${FOVEA_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(fovea_flags INTERFACE -fsanitize=${FOVEA_SANITIZE})
endif()
