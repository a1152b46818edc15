# Whether the CUDA engines are part of this build: FOVEA_CUDA is ON, OFF, or AUTO (when nvcc is found).
set(FOVEA_CUDA AUTO CACHE STRING "Build the CUDA engines: ON, OFF, or AUTO (ON where nvcc is found)")
set(FOVEA_CUDA_ARCHITECTURES "80-real;90-real;90-virtual" CACHE STRING
    "GPU architectures to build for, as CMAKE_CUDA_ARCHITECTURES takes them")
option(FOVEA_CUDA_LINEINFO "Name source lines in GPU code, for profilers and compute-sanitizer" OFF)

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

# How the library's CUDA files are compiled. Operators and implicit conversions of 16-bit types are not used, and take
# every file time to read.
function(fovea_compile_cuda library)
  target_include_directories(${library} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include
                                                ${CUDAToolkit_INCLUDE_DIRS})
  # CMake before 3.25.2 does not know how nvcc 13 is asked for C++20.
  set_target_properties(${library} PROPERTIES CUDA_STANDARD_REQUIRED OFF)
  target_compile_options(${library} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__
                               -D__CUDA_NO_HALF2_OPERATORS__ -D__CUDA_NO_BFLOAT16_OPERATORS__
                               -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_BFLOAT162_OPERATORS__
                               --std=c++20 --expt-relaxed-constexpr $<$<BOOL:${FOVEA_CUDA_LINEINFO}>:-lineinfo>
                               -Xptxas=--warn-on-spills,--warning-as-error>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wno-restrict>)
endfunction()

# Layers on a GPU multiply by cuBLASLt, which is loaded when they run: only its header is built with. The
# toolkit has it, or the Python package nvidia-cublas in .venv (./run setup).
if(fovea_with_cuda)
  file(GLOB fovea_cublas_packages
       ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu${CUDAToolkit_VERSION_MAJOR}/include)
  find_path(FOVEA_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${fovea_cublas_packages}
            NO_DEFAULT_PATH DOC "The folder of cublasLt.h, for layers on a GPU")
  if(FOVEA_CUBLASLT_INCLUDE)
    message(STATUS "fovea: layers on a GPU ON, with ${FOVEA_CUBLASLT_INCLUDE}/cublasLt.h")
  else()
    message(STATUS "fovea: layers on a GPU OFF: cublasLt.h was found neither in the CUDA toolkit nor in .venv "
                   "(./run setup installs it)")
  endif()
endif()
