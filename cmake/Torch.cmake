# Whether fovea's ops for PyTorch are part of this build: FOVEA_TORCH is ON, OFF, or AUTO (when FOVEA_PYTHON has a
# torch that is new enough). Only headers of torch's stable ABI are used, so find_package(Torch) is not.
set(FOVEA_TORCH AUTO CACHE STRING "Build the ops for PyTorch: ON, OFF, or AUTO (ON where torch is found)")
set(FOVEA_PYTHON "" CACHE FILEPATH "The Python whose torch the ops are built for; empty: python3")
set(fovea_oldest_torch 2.11)

# Sets torch_dir and torch_version, or why_no_torch.
function(find_torch python)
  # Not `import torch`: that takes seconds, and loads what a build does not need.
  execute_process(COMMAND ${python} -c [[
import importlib.metadata, importlib.util, os
print(os.path.dirname(importlib.util.find_spec("torch").origin), importlib.metadata.version("torch"), sep=";", end="")]]
                  OUTPUT_VARIABLE found RESULT_VARIABLE code ERROR_QUIET)
  if(NOT code EQUAL 0)
    set(why_no_torch "${python} has no torch" PARENT_SCOPE)
    return()
  endif()
  list(GET found 0 dir)
  list(GET found 1 version)
  if(version VERSION_LESS fovea_oldest_torch)
    set(why_no_torch "torch is ${version}, must be at least ${fovea_oldest_torch}" PARENT_SCOPE)
  else()
    set(torch_dir ${dir} PARENT_SCOPE)
    set(torch_version ${version} PARENT_SCOPE)
  endif()
endfunction()

set(fovea_with_torch OFF)
if(FOVEA_SANITIZE)
  set(why_no_torch "a sanitized library cannot be loaded into a plain Python")
elseif(FOVEA_TORCH STREQUAL "AUTO" OR FOVEA_TORCH)
  set(fovea_python ${FOVEA_PYTHON})
  if(NOT fovea_python)
    set(fovea_python python3)
    if(SKBUILD)  # the Python that pip builds the package with
      set(fovea_python ${Python_EXECUTABLE})
    endif()
  endif()
  find_torch(${fovea_python})
  if(torch_dir)
    set(fovea_with_torch ON)
  elseif(NOT FOVEA_TORCH STREQUAL "AUTO")
    message(FATAL_ERROR "FOVEA_TORCH is ${FOVEA_TORCH}, but ${why_no_torch}")
  endif()
else()
  set(why_no_torch "FOVEA_TORCH is ${FOVEA_TORCH}")
endif()
if(fovea_with_torch)
  message(STATUS "fovea: ops for torch ${torch_version} in ${torch_dir}")
else()
  message(STATUS "fovea: no ops for torch: ${why_no_torch}")
endif()
