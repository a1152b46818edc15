# Installs the build, moves the tree, then builds and runs the consumer project against it.
set(room ${build}/install_test)
file(REMOVE_RECURSE ${room})
file(MAKE_DIRECTORY ${room})

function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REPLACE ";" " " line "${ARGN}")
  message(STATUS "${line}")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${line}\nexit status ${code}\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

function(must_print wanted)
  must(${ARGN})
  string(FIND "${output}" "${wanted}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "${ARGN}\nprinted\n${output}\nand not: ${wanted}")
  endif()
endfunction()

# An installed tree may be moved: nothing in it may remember where it was first put.
must(${CMAKE_COMMAND} --install ${build} --prefix ${room}/first)
file(RENAME ${room}/first ${room}/prefix)

# The README's example is the C++ consumer: the first cpp block, to the letter.
file(READ ${source}/README.md readme)
string(FIND "${readme}" "```cpp\n" from)
if(from EQUAL -1)
  message(FATAL_ERROR "README.md has no ```cpp block to compile")
endif()
math(EXPR from "${from} + 7")
string(SUBSTRING "${readme}" ${from} -1 readme)
string(FIND "${readme}" "```" to)
string(SUBSTRING "${readme}" 0 ${to} example)
file(COPY ${source}/tests/install/consumer DESTINATION ${room})
file(WRITE ${room}/consumer/example.cc "${example}")

must(${CMAKE_COMMAND} -S ${room}/consumer -B ${room}/consumer/build -G ${generator} -DCMAKE_BUILD_TYPE=Release
     -DCMAKE_PREFIX_PATH=${room}/prefix -DCMAKE_CXX_COMPILER=${cxx} -DCMAKE_C_COMPILER=${cc}
     -DFOVEA_EXPECTED_VERSION=${version})
must(${CMAKE_COMMAND} --build ${room}/consumer/build)
must_print("out[0] = 1" ${room}/consumer/build/example)
must_print("out[0] = 1" ${room}/consumer/build/example_c)
if(EXISTS ${room}/prefix/bin/fovea)
  must_print("${version}" ${room}/prefix/bin/fovea info)
endif()

if(pkg_config)
  file(GLOB_RECURSE pc ${room}/prefix/fovea.pc)
  cmake_path(GET pc PARENT_PATH pc_dir)
  must(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${pkg_config} --static --cflags --libs fovea)
  string(STRIP "${output}" flags)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  must(${cc} -std=c11 -Wall -Werror ${room}/consumer/example.c ${flags} -Wl,-rpath,${pc_dir}/.. -o ${room}/by_pkg_config)
  must_print("out[0] = 1" ${room}/by_pkg_config)
endif()
