/* A stand-in for pyxis, Slurm's plugin for containers, of whose options it has those that projects use.
 * An image is a folder with a root file system, which the task then sees in the place of the node's,
 * with the mounts that were asked for; what it writes there is lost. A name that is no folder leaves the
 * task where it is: nothing is imported here. Source of the options: github.com/NVIDIA/pyxis. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1)

enum { IMAGE, MOUNTS, WORKDIR };
static char *given[3];

static int take(int which, const char *value, int remote)
{
    (void)remote;
    given[which] = strdup(value);
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "the image", 1, IMAGE, take},
    {"container-mounts", "SRC:DST[,SRC:DST...]", "bind mounts", 1, MOUNTS, take},
    {"container-workdir", "PATH", "working directory", 1, WORKDIR, take},
    SPANK_OPTIONS_TABLE_END,
};

static int failed(const char *what)
{
    slurm_error("pyxis: %s: %s", what, strerror(errno));
    return -1;
}

/* Bind a folder or a file of the node into the new root; its place is made there. */
static int bind_into(const char *root, const char *source, const char *target)
{
    char place[4096];
    struct stat facts;
    if (stat(source, &facts))
        return failed(source);
    snprintf(place, sizeof place, "%s%s", root, target);
    for (char *at = place + strlen(root) + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(place, 0755);
        *at = '/';
    }
    if (S_ISDIR(facts.st_mode))
        mkdir(place, 0755);
    else
        fclose(fopen(place, "a"));
    return mount(source, place, NULL, MS_BIND | MS_REC, NULL) ? failed(place) : 0;
}

static int enter(const char *image)
{
    char root[] = "/tmp/pyxis-XXXXXX", layers[8192];
    const char *nodes[] = {"/proc", "/sys", "/dev", "/etc/hosts", "/etc/resolv.conf"};
    if (!mkdtemp(root) || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return failed("namespace");
    if (mount("tmpfs", root, "tmpfs", 0, NULL))
        return failed(root);
    snprintf(layers, sizeof layers, "%s/upper", root);
    mkdir(layers, 0755);
    snprintf(layers, sizeof layers, "%s/work", root);
    mkdir(layers, 0755);
    snprintf(layers, sizeof layers, "lowerdir=%s,upperdir=%s/upper,workdir=%s/work", image, root, root);
    char merged[64];
    snprintf(merged, sizeof merged, "%s/merged", root);
    mkdir(merged, 0755);
    if (mount("overlay", merged, "overlay", 0, layers))
        return failed("overlay");
    for (int i = 0; i < 5; i++)
        if (bind_into(merged, nodes[i], nodes[i]))
            return -1;
    for (char *pair = strtok(given[MOUNTS], ","); pair; pair = strtok(NULL, ",")) {
        char *target = strchr(pair, ':');
        if (!target) {
            errno = EINVAL;
            return failed(pair);
        }
        *target++ = 0;
        if (bind_into(merged, pair, target))
            return -1;
    }
    return chroot(merged) ? failed("chroot") : 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
    struct stat facts;
    (void)spank, (void)count, (void)arguments;
    if (!given[IMAGE])
        return 0;
    if (!stat(given[IMAGE], &facts) && S_ISDIR(facts.st_mode) && enter(given[IMAGE]))
        return -1;
    return given[WORKDIR] && chdir(given[WORKDIR]) ? failed(given[WORKDIR]) : 0;
}
