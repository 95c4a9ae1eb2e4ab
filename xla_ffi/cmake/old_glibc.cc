// What the static libstdc++ takes from glibc 2.32 and newer, for glibc 2.28.

// "There may be other threads": shared pointers then count atomically. Never set.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
