# AMD code objects without ROCm: clang and lld of the PyPI package `ziglang`, compiler builtins only.
#
# in : MLA_FP8_HIP_ARCHS   the GPUs
#      MLA_FP8_ZIG         ziglang's zig; default: that of the Python found first
# out: mla_fp8_hip_objects(<variable> <source>...)   one object per source: host code and, embedded, an offload
#      bundle with the source's kernels for every GPU. The files are CUDA's, see csrc/cuda/device/platform.cuh.

set(MLA_FP8_HIP_ARCHS "gfx90a;gfx942;gfx950" CACHE STRING "AMD GPUs")
set(MLA_FP8_ZIG "" CACHE FILEPATH "the zig of the PyPI package ziglang")
if(NOT MLA_FP8_ZIG)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')"
    OUTPUT_VARIABLE zig OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "mla_fp8: ${Python3_EXECUTABLE} has no ziglang (pip install ziglang); or set -DMLA_FP8_ZIG=...")
  endif()
  set(MLA_FP8_ZIG "${zig}" CACHE FILEPATH "" FORCE)
endif()

# clang looks for a program called lld and passes the flavour; zig has it as a subcommand. The PATH is set by a script:
# as a part of the commands it would have every file compiled again in a shell with another PATH.
set(hip_dir "${CMAKE_BINARY_DIR}/hip")
set(scripts "${hip_dir}/bin")
file(WRITE "${scripts}/lld" "#!/bin/sh\nshift 2\nexec '${MLA_FP8_ZIG}' ld.lld \"$@\"\n")
file(WRITE "${scripts}/clang" "#!/bin/sh\nPATH='${scripts}':$PATH exec '${MLA_FP8_ZIG}' clang \"$@\"\n")
file(CHMOD "${scripts}/lld" "${scripts}/clang" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)

# Commands run in the build folder. Without this checkout's paths in them what one has compiled serves all.
cmake_path(GET MLA_FP8_ZIG PARENT_PATH zig_dir)
cmake_path(RELATIVE_PATH zig_dir BASE_DIRECTORY "${CMAKE_BINARY_DIR}")
# -resource-dir: clang's own headers. -Wno-pass-failed: some kernels' LDS allows one block, not the two that their
# registers are to allow.
set(hip_clang ${scripts}/clang
  --target=x86_64-linux-gnu -resource-dir ${zig_dir}/lib -x hip -nogpuinc -nogpulib -std=c++20
  -I${CMAKE_CURRENT_SOURCE_DIR}/csrc -DMLA_FP8_WITH_HIP=1 -include hip/platform.h -Wall -Wno-pass-failed
  $<$<BOOL:${MLA_FP8_WERROR}>:-Werror>)
# ccache wants the driver to list the headers (-MD), which it does not for a GPU: clang itself is told to, as well.
set(hip_device_clang ${hip_clang} -MD -Wno-unused-command-line-argument)
if(CCACHE)
  execute_process(COMMAND ${MLA_FP8_ZIG} version OUTPUT_VARIABLE zig_version OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  list(PREPEND hip_device_clang ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_DEPEND=1 CCACHE_COMPILERTYPE=clang "CCACHE_COMPILERCHECK=string:zig ${zig_version}" ${CCACHE})
endif()

function(mla_fp8_hip_objects variable)
  set(objects "")
  foreach(source IN LISTS ARGN)
    cmake_path(GET source STEM name)
    set(code_objects "")
    set(bundled "")
    foreach(arch IN LISTS MLA_FP8_HIP_ARCHS)
      set(out "${hip_dir}/${name}.${arch}.hsaco")
      set(headers "hip/${name}.${arch}.hsaco.d")
      # Code object 5: clang's default, 6, needs a newer ROCm than torch's.
      add_custom_command(OUTPUT ${out}
        COMMAND ${hip_device_clang} -cuid=${name} --cuda-device-only --no-gpu-bundle-output --offload-arch=${arch} -O3
          -mcode-object-version=5 -Xoffload-linker --strip-all
          -MF ${headers} -Xclang -dependency-file -Xclang ${headers} -c ${source} -o ${out}
        DEPENDS ${source} DEPFILE ${out}.d COMMENT "HIP ${arch} ${name}" VERBATIM COMMAND_EXPAND_LISTS)
      list(APPEND code_objects ${out})
      list(APPEND bundled ${arch}=${out})
    endforeach()
    set(bundle "${hip_dir}/${name}.fatbin")
    add_custom_command(OUTPUT ${bundle}
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/csrc/hip/bundle.py ${bundle} ${bundled}
      DEPENDS ${code_objects} csrc/hip/bundle.py VERBATIM)
    set(object "${hip_dir}/${name}.o")
    add_custom_command(OUTPUT ${object}
      COMMAND ${hip_clang} -cuid=${name} --cuda-host-only -O2 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden
        -Xclang -fcuda-include-gpubinary -Xclang ${bundle}
        -Xclang -dependency-file -Xclang ${object}.d -Xclang -MT -Xclang ${object}
        -c ${source} -o ${object}
      DEPENDS ${source} ${bundle} DEPFILE ${object}.d COMMENT "HIP host ${name}" VERBATIM COMMAND_EXPAND_LISTS)
    list(APPEND objects ${object})
  endforeach()
  set(${variable} ${objects} PARENT_SCOPE)
endfunction()
