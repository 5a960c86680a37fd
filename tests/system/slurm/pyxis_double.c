/* A test double of pyxis (https://github.com/NVIDIA/pyxis): the options of srun that the batch scripts use, for images
 * that are unpacked folders. Each task gets a mount namespace, the mounts it asks for, and the image as its root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis_double, 1)

enum { IMAGE = 1, MOUNTS, WORKDIR, NO_HOME, NAME };

static char image[4096], mounts[16384], workdir[4096], name[256];

static int keep(int which, const char *value, int remote) {
    (void)remote;
    char *place = which == IMAGE ? image : which == MOUNTS ? mounts : which == WORKDIR ? workdir : which == NAME ? name : NULL;
    size_t room = which == MOUNTS ? sizeof mounts : which == NAME ? sizeof name : sizeof image;
    if (place && value && (size_t)snprintf(place, room, "%s", value) >= room)
        return -1;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "PATH", "unpacked image", 1, IMAGE, keep},
    {"container-mounts", "SRC:DST[:FLAGS][,...]", "bind mounts", 1, MOUNTS, keep},
    {"container-workdir", "PATH", "working directory", 1, WORKDIR, keep},
    {"container-name", "NAME", "container that other steps of the job use, too", 1, NAME, keep},
    {"no-container-mount-home", NULL, "no home directory", 0, NO_HOME, keep},
    SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    for (int i = 0; options[i].name; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

static int make_place(char *path, int directory) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0755) && errno != EEXIST)
            return -1;
        *slash = '/';
    }
    if (directory)
        return mkdir(path, 0755) && errno != EEXIST ? -1 : 0;
    int file = open(path, O_CREAT | O_RDONLY | O_CLOEXEC, 0644);
    return file < 0 ? -1 : close(file);
}

static int bind_mount(const char *source, const char *target) {
    char place[8192];
    struct stat found;
    snprintf(place, sizeof place, "%s%s", image, target);
    if (stat(source, &found) || make_place(place, S_ISDIR(found.st_mode)) || mount(source, place, NULL, MS_BIND | MS_REC, NULL)) {
        slurm_error("pyxis_double: %s on %s: %m", source, place);
        return -1;
    }
    return 0;
}

/* An image is imported by the first task of a node that names the container, each time without a name. */
static int import(void) {
    char host[256], seen[8192], log[8192];
    if (gethostname(host, sizeof host))
        return -1;
    snprintf(seen, sizeof seen, "%s/.imported-%s-%s", image, name, host);
    if (name[0]) {
        int first = open(seen, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
        if (first < 0)
            return errno == EEXIST ? 0 : -1;
        close(first);
    }
    snprintf(log, sizeof log, "%s/imports", image);
    int file = open(log, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0644);
    int written = file < 0 ? -1 : dprintf(file, "%s\n", host);
    return file < 0 || close(file) || written < 0 ? -1 : 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments) {
    (void)spank, (void)count, (void)arguments;
    if (!image[0])
        return 0;
    if (import())
        return -1;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return -1;
    if (bind_mount("/dev", "/dev") || bind_mount("/proc", "/proc") || bind_mount("/sys", "/sys"))
        return -1;
    char *rest = NULL;
    for (char *entry = strtok_r(mounts, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        char *target = strchr(entry, ':');
        if (!target)
            return -1;
        *target++ = 0;
        char *flags = strchr(target, ':');
        if (flags)
            *flags = 0;
        if (bind_mount(entry, target))
            return -1;
    }
    return chroot(image) || chdir("/") ? -1 : 0;
}

/* After Slurm's own change into the directory of the submission. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)spank, (void)count, (void)arguments;
    return image[0] && workdir[0] ? chdir(workdir) : 0;
}
