# Torch for a stable-ABI extension, without find_package(Torch): that would force -gencode flags and libraries
# of its own on us. We need two things: the headers of the torch in the build environment, and a DT_NEEDED entry
# for libtorch.so, whose own dependencies bring every symbol in at load time.
#
# in : MLA_FP8_TORCH_DIR     the torch package (site-packages/torch); default: that of the Python found first
#      MLA_FP8_TORCH_TARGET  the oldest torch that the libraries must load in
# out: target mla_fp8::torch_stable

set(MLA_FP8_TORCH_DIR "" CACHE PATH "torch package directory (site-packages/torch)")
set(MLA_FP8_TORCH_TARGET "2.10" CACHE STRING "oldest torch the libraries load in")

if(NOT MLA_FP8_TORCH_DIR)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "mla_fp8: ${Python3_EXECUTABLE} has no torch; set -DMLA_FP8_TORCH_DIR=...")
  endif()
  set(MLA_FP8_TORCH_DIR "${torch_dir}" CACHE PATH "" FORCE)
endif()

set(version_header "${MLA_FP8_TORCH_DIR}/include/torch/headeronly/version.h")
if(NOT EXISTS "${version_header}")
  message(FATAL_ERROR "mla_fp8: no stable-ABI headers in ${MLA_FP8_TORCH_DIR}; torch >= 2.10 is needed to build")
endif()
foreach(part MAJOR MINOR)
  file(STRINGS "${version_header}" line REGEX "define TORCH_VERSION_${part} ")
  string(REGEX REPLACE ".*TORCH_VERSION_${part} +([0-9]+).*" "\\1" torch_${part} "${line}")
endforeach()
if("${torch_MAJOR}.${torch_MINOR}" VERSION_LESS MLA_FP8_TORCH_TARGET)
  message(FATAL_ERROR "mla_fp8: torch ${torch_MAJOR}.${torch_MINOR} is older than the target ${MLA_FP8_TORCH_TARGET}")
endif()
string(REPLACE "." ";" target_parts "${MLA_FP8_TORCH_TARGET}")
list(GET target_parts 0 target_major)
list(GET target_parts 1 target_minor)
math(EXPR target_version "(${target_major} << 56) | (${target_minor} << 48)" OUTPUT_FORMAT HEXADECIMAL)
message(STATUS "mla_fp8: headers of torch ${torch_MAJOR}.${torch_MINOR}, loads in torch >= ${MLA_FP8_TORCH_TARGET}")

# An empty library with the right SONAME is enough to link against: at load time the name matches the copy that
# `import torch` has mapped, so there is no RPATH either. Undefined symbols must stay allowed.
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/torch_stub/stub.c" CONTENT "/* the SONAME of libtorch.so, nothing else */\n")
add_library(mla_fp8_torch_stub SHARED "${CMAKE_BINARY_DIR}/torch_stub/stub.c")
set_target_properties(mla_fp8_torch_stub PROPERTIES
  OUTPUT_NAME torch LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/torch_stub")

add_library(mla_fp8_torch_stable INTERFACE)
add_library(mla_fp8::torch_stable ALIAS mla_fp8_torch_stable)
target_include_directories(mla_fp8_torch_stable SYSTEM INTERFACE "${MLA_FP8_TORCH_DIR}/include")
target_compile_definitions(mla_fp8_torch_stable INTERFACE "TORCH_TARGET_VERSION=${target_version}ULL")
target_link_libraries(mla_fp8_torch_stable INTERFACE
  "-Wl,--push-state,--no-as-needed" mla_fp8_torch_stub "-Wl,--pop-state" ${CMAKE_DL_LIBS})
