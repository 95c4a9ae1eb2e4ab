# Copies the files of a folder to `name` in the build folder, those whose contents have changed. An
# isolated build unpacks its packages to another folder each time; compiled against the copy, nothing
# is compiled again.
function(jax_ep_keep_copy folder name)
  file(GLOB_RECURSE files RELATIVE "${folder}" "${folder}/*")
  list(FILTER files EXCLUDE REGEX "\\.(py|pyc|pyi)$|__pycache__")
  foreach(file IN LISTS files)
    configure_file("${folder}/${file}" "${CMAKE_BINARY_DIR}/${name}/${file}" COPYONLY)
  endforeach()
endfunction()
