// Included first when a wheel for x86-64 is built, so that it runs with glibc 2.28 although a newer one is at hand: these
// functions got a second version later. For what the kernels call them with, both do the same.
__asm__(
    ".symver pthread_create, pthread_create@GLIBC_2.2.5\n"
    ".symver pthread_detach, pthread_detach@GLIBC_2.2.5\n"
    ".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4\n"
    ".symver exp, exp@GLIBC_2.2.5\n"
    ".symver log, log@GLIBC_2.2.5\n");
