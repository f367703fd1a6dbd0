# mla_fp8_put_in_place(TARGET FOLDER [STRIP]): the library goes to FOLDER as soon as it is linked.
# It is copied, and stripped if asked for, beside its place and then renamed, so that a process finds the old one or the new one,
# never a part, and after a failed build the old one still loads.
if(CMAKE_SCRIPT_MODE_FILE)  # cmake -DFROM=... -DTO=... -DSTRIP=... -P PutInPlace.cmake
  get_filename_component(folder "${TO}" DIRECTORY)
  file(MAKE_DIRECTORY "${folder}")
  file(COPY_FILE "${FROM}" "${TO}.new")
  if(STRIP)
    execute_process(COMMAND "${STRIP}" "${TO}.new" COMMAND_ERROR_IS_FATAL ANY)
  endif()
  file(RENAME "${TO}.new" "${TO}")
  return()
endif()

function(mla_fp8_put_in_place target folder)
  get_target_property(type ${target} TYPE)
  foreach(part PREFIX SUFFIX)
    get_target_property(own ${target} ${part})
    string(TOLOWER ${part} name)
    if(own MATCHES "NOTFOUND$")
      set(${name} "${CMAKE_${type}_${part}}")
    else()
      set(${name} "${own}")
    endif()
  endforeach()
  set(strip "")
  if("STRIP" IN_LIST ARGN)
    set(strip "${CMAKE_STRIP}")
  endif()
  set(placed "${folder}/${prefix}${target}${suffix}")
  add_custom_command(OUTPUT "${placed}" DEPENDS ${target} VERBATIM
    COMMAND ${CMAKE_COMMAND} "-DFROM=$<TARGET_FILE:${target}>" "-DTO=${placed}"
      "-DSTRIP=${strip}" -P "${CMAKE_CURRENT_FUNCTION_LIST_FILE}"
    COMMENT "Putting ${prefix}${target}${suffix} in its place")
  add_custom_target(place_${target} ALL DEPENDS "${placed}")
endfunction()
