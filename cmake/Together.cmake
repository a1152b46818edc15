# Most of what the compiler reads of a file is headers: the files of a folder are compiled as one, so their names are
# told apart within it, those of unnamed namespaces too. Who edits files compiles them one by one.
option(FOVEA_TOGETHER "Compile the C++ files of a folder, and small CUDA files, as one" ON)

# fovea_compile_together(target): each folder of its C++ files.
function(fovea_compile_together target)
  if(NOT FOVEA_TOGETHER)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cc$")
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    string(MAKE_C_IDENTIFIER "in ${folder}" group)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()

# fovea_add_kernels(target name files...): CUDA files, which CMake would leave one by one, as one of that name.
function(fovea_add_kernels target name)
  if(NOT FOVEA_TOGETHER)
    target_sources(${target} PRIVATE ${ARGN})
    return()
  endif()
  set(together "")
  foreach(file IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH file)
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src)
    string(APPEND together "#include \"${file}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${name}.cu CONTENT "${together}" @ONLY)
  target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${name}.cu)
endfunction()
