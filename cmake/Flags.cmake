# Warnings and sanitizers of every target, as one interface library.
add_library(fovea_flags INTERFACE)
target_compile_options(fovea_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fovea_flags INTERFACE -Wno-restrict)  # false alarms on std::string, GCC bug 105651
endif()
if(FOVEA_SANITIZE)
  # A UBSAN finding must fail the test it is found in, not only be printed.
  target_compile_options(fovea_flags INTERFACE -fsanitize=${FOVEA_SANITIZE} -fno-sanitize-recover=all
                                               -fno-omit-frame-pointer -g1)
  target_link_options(fovea_flags INTERFACE -fsanitize=${FOVEA_SANITIZE})
endif()
