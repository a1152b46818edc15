# What `cmake --install` puts where, so that find_package(fovea) and pkg-config find it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(fovea PROPERTIES VERSION ${PROJECT_VERSION}
                                       SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_compile_features(fovea PUBLIC cxx_std_20)
install(TARGETS fovea EXPORT fovea-targets)
install(DIRECTORY include/fovea TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
if(TARGET fovea_cli)
  # A shared libfovea is found beside the program, wherever the prefix is moved to.
  file(RELATIVE_PATH to_libraries ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(fovea_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${to_libraries}")
  install(TARGETS fovea_cli)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
install(EXPORT fovea-targets NAMESPACE fovea:: DESTINATION ${package_dir})
configure_package_config_file(cmake/fovea-config.cmake.in ${PROJECT_BINARY_DIR}/fovea-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fovea-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fovea-config.cmake ${PROJECT_BINARY_DIR}/fovea-config-version.cmake
        DESTINATION ${package_dir})

# Paths in the .pc file are relative to it: an installed tree may be moved.
file(RELATIVE_PATH prefix_from_pc ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(cuda_libraries "")
if(fovea_with_cuda)
  set(cuda_libraries "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
configure_file(cmake/fovea.pc.in ${PROJECT_BINARY_DIR}/fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fovea.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
