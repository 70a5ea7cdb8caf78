/* Gives OpenBLAS of PyPI's package scipy-openblas32 the names that MLX's library links.
 *
 * That OpenBLAS has a prefix on its names, so that it can stand beside others in one process:
 * cblas_sgemm is scipy_cblas_sgemm. Each name here is an indirect function (GNU ifunc), which has no
 * code of its own: when the dynamic linker binds libmlx to it, it calls find_NAME, and binds libmlx
 * to the function that this returns. Arguments stay where libmlx puts them, so no prototypes are
 * needed, and a call takes no longer. paged_kv/openblas.py calls paged_kv_use_openblas before it
 * makes these names visible to the process.
 */

#include <dlfcn.h>
#include <stddef.h>

/* What `nm -D --undefined-only libmlx.so` lists of BLAS and LAPACK. */
#define FOR_EACH_NAME(DO) \
  DO(cblas_cgemm) DO(cblas_dgemm) DO(cblas_sgemm) \
  DO(cgeev_) DO(cgesdd_) DO(cheevd_) \
  DO(dgeev_) DO(dgeqrf_) DO(dgesdd_) DO(dgetrf_) DO(dgetri_) DO(dorgqr_) DO(dpotrf_) DO(dsyevd_) \
  DO(dtrtri_) \
  DO(sgeev_) DO(sgeqrf_) DO(sgesdd_) DO(sgetrf_) DO(sgetri_) DO(sorgqr_) DO(spotrf_) DO(ssyevd_) \
  DO(strtri_)

#define VISIBLE __attribute__((visibility("default")))

typedef void function(void);

#define DECLARE(name) static function *found_##name;
FOR_EACH_NAME(DECLARE)

#define DEFINE(name) \
  static function *find_##name(void) { return found_##name; } \
  VISIBLE __attribute__((ifunc("find_" #name))) void name(void);
FOR_EACH_NAME(DEFINE)

/* Finds all functions in a library that dlopen returned. Returns NULL, or the name of one that is
 * missing: then the names of this library must not become visible. */
VISIBLE const char *paged_kv_use_openblas(void *library) {
#define FIND(name) \
  *(void **)&found_##name = dlsym(library, "scipy_" #name); \
  if (found_##name == NULL) return "scipy_" #name;
  FOR_EACH_NAME(FIND)
  return NULL;
}
