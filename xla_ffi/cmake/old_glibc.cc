// What the static libstdc++ takes from glibc 2.32 and newer, for glibc 2.28.

// Never set: zero means that there may be other threads, so shared pointers count atomically.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
