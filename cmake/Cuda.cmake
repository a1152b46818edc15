# Whether the CUDA engines are part of this build: FOVEA_CUDA is ON, OFF, or AUTO (when nvcc is found).
set(FOVEA_CUDA AUTO CACHE STRING "Build the CUDA engines: ON, OFF, or AUTO (ON where nvcc is found)")
set(FOVEA_CUDA_ARCHITECTURES "80-real;90-real;90-virtual" CACHE STRING
    "GPU architectures to build for, as CMAKE_CUDA_ARCHITECTURES takes them")

set(fovea_with_cuda OFF)
if(FOVEA_CUDA STREQUAL "AUTO" OR FOVEA_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  # Set before the language is enabled: otherwise CMake guesses one of its own.
  set(CMAKE_CUDA_ARCHITECTURES ${FOVEA_CUDA_ARCHITECTURES})
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(fovea_with_cuda ON)
  elseif(NOT FOVEA_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "FOVEA_CUDA is ${FOVEA_CUDA}, but no CUDA compiler was found")
  endif()
endif()
message(STATUS "fovea: CUDA engines ${fovea_with_cuda}")
