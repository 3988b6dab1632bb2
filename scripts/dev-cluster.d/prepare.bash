# shellcheck shell=bash
# Steps of `scripts/dev-cluster up` before the first machine boots: checks, packages, the state folder.
# Sourced only by scripts/dev-cluster.

PACKAGES=(slurmctld slurmd slurm-client slurmdbd slurm-wlm-basic-plugins munge mariadb-server iproute2 procps)
SUBNET=10.177.0 # in the cluster's own network namespaces: it cannot collide with the host's
POLICY=/usr/sbin/policy-rc.d

# --- requirements ---------------------------------------------------------------------------------------------------

require_system() {
  ((EUID == 0)) || fail $EXIT_SKIPPED "needs root: it makes namespaces, mounts and a user. Run it with sudo."
  grep -qE '^ID(_LIKE)?=.*(debian|ubuntu)' /etc/os-release 2>/dev/null && command -v apt-get >/dev/null ||
    fail $EXIT_SKIPPED "needs Debian or Ubuntu: it takes Slurm from their packages." \
      "Use such a machine, a VM or a privileged container."
  [[ $STATE =~ ^/[A-Za-z0-9._/-]{1,80}$ ]] ||
    fail 1 "FTKIT_DEV_CLUSTER_DIR=$STATE cannot be used." \
      "Slurm wants a short absolute path of letters, digits and . _ - / only."
  [[ ! -e $STATE || -e $STATE/.dev-cluster || -z $(ls -A "$STATE") ]] ||
    fail 1 "$STATE exists and was not made by dev-cluster." \
      "It would be deleted by \`down\`: choose another FTKIT_DEV_CLUSTER_DIR."
}

require_namespaces() {
  unshare --mount --uts --ipc --net --pid --fork true 2>/dev/null ||
    fail $EXIT_SKIPPED "this machine does not let root make namespaces: probably an unprivileged container." \
      "Use a VM, or start the container with --privileged."
}

require_network_devices() {
  unshare --net sh -c 'ip link add br0 type bridge && ip link add veth0 type veth peer name veth1' 2>/dev/null ||
    fail $EXIT_SKIPPED "this kernel has no veth or bridge devices." \
      "Load them (modprobe veth; modprobe bridge) or use another machine."
}

# --- packages -------------------------------------------------------------------------------------------------------

install_packages() {
  local missing=() package
  for package in "${PACKAGES[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  apt_install "${missing[@]}" || { apt-get -q update >&2 && apt_install "${missing[@]}"; } ||
    fail 1 "apt-get could not install ${missing[*]} (its messages are above)." \
      "Usually there is no network or no package mirror. Install them by hand, then try again."
}

is_installed() { # PACKAGE
  # shellcheck disable=SC2016  # dpkg expands this
  [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

# The packages would start their daemons; the cluster needs only the programs. Runs in a mount namespace, so that
# an existing policy file is not changed.
apt_install() {
  local ours=0 code=0
  [[ -e $POLICY ]] || ours=1
  if ((ours)); then
    trap 'rm -f "$POLICY"' EXIT
    touch "$POLICY"
  fi
  # shellcheck disable=SC2016  # the inner shell expands these
  DEBIAN_FRONTEND=noninteractive unshare --mount bash -c '
    mount --bind "$1" "$2" && apt-get -q install --yes --no-install-recommends "${@:3}"
  ' bash "$PARTS/policy-rc.d" "$POLICY" "$@" >&2 9>&- || code=$?
  if ((ours)); then
    rm -f "$POLICY"
    trap - EXIT
  fi
  return "$code"
}

# --- the state folder -----------------------------------------------------------------------------------------------

make_state() { # NUM_NODES CGROUPS
  local i
  mkdir -p "$STATE"
  touch "$STATE/.dev-cluster"
  [[ "$(getent passwd "$OUR_USER")" != *":${OUR_MARK% *} "* ]] ||
    fail 1 "the user $OUR_USER belongs to another dev cluster: $(getent passwd "$OUR_USER")" \
      "Give this one its own: FTKIT_DEV_CLUSTER_USER=NAME. Or take the other down, with its FTKIT_DEV_CLUSTER_DIR."
  id "$OUR_USER" >/dev/null 2>&1 ||
    useradd --no-create-home --home-dir "$STATE/home" --shell /bin/bash --comment "$OUR_MARK" "$OUR_USER"
  mkdir "$STATE"/{run,log,etc,gpus,machines,munge,mariadb,slurmctld,home,shared}
  chown munge: "$STATE/munge"
  chown mysql: "$STATE/mariadb"
  chown slurm: "$STATE/slurmctld" "$STATE/log"
  chown "$OUR_USER:" "$STATE/home" "$STATE/shared"
  for i in {0..7}; do mknod --mode=666 "$STATE/gpus/nvidia$i" c 1 3; done # each is another /dev/null
  write_configuration "$1"
  [[ -z $2 ]] || write_cgroups
  write_containers
  write_paths
  write_home
}

write_configuration() { # NUM_NODES
  local etc=$STATE/etc file i cgroups=cgroup/v1
  for file in slurm.conf slurmdbd.conf gres.conf; do
    sed -e "s|@STATE@|$STATE|g" -e "s|@NODES@|n[1-$1]|g" "$PARTS/$file" >"$etc/$file"
  done
  # By default slurmd would request a scope from the host's systemd. With v1 and no plugin that uses it, cgroups are
  # not touched; newer versions have an explicit setting for that.
  dpkg --compare-versions "$(slurmd -V | awk '{ print $NF }')" lt 24.05 || cgroups=disabled
  echo "CgroupPlugin=$cgroups" >"$etc/cgroup.conf"
  cp "$PARTS/accounts.sql" "$etc"
  {
    echo "127.0.0.1 localhost"
    echo "$SUBNET.1 controller"
    echo "$SUBNET.2 login"
    for ((i = 1; i <= $1; i++)); do echo "$SUBNET.$((10 + i)) n$i"; done
  } >"$etc/hosts"
  head -c 1024 /dev/urandom >"$etc/munge.key"
  chmod 600 "$etc/munge.key" "$etc/slurmdbd.conf"
  chown munge: "$etc/munge.key"
  chown slurm: "$etc/slurmdbd.conf"
}

# Each node sees its own part of the machine's cgroups as all cgroups: machine-init mounts it.
write_cgroups() {
  cgroup_of >"$STATE/etc/cgroups"
  sed -i -e 's|^ProctrackType=.*|ProctrackType=proctrack/cgroup|' -e 's|^TaskPlugin=.*|TaskPlugin=task/cgroup|' \
    "$STATE/etc/slurm.conf"
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup ConstrainRAMSpace=yes >"$STATE/etc/cgroup.conf"
}

cgroup_of() { echo "/ftkit-dev${STATE//\//-}"; } # of this cluster, in each hierarchy

# With enroot and pyxis on this machine, srun starts containers here too. enroot's settings are a copy of the machine's,
# which the nodes mount over them: containers are on a node's own disk, where a power cut leaves them, and the hook for
# cgroups, which a node's /sys does not have, is left out.
write_containers() {
  local plugin settings etc=$STATE/etc
  plugin=$(find_pyxis)
  settings=$(enroot_settings)
  [[ -n $plugin && -n $settings ]] || return 0
  cp --recursive "$settings" "$etc/enroot"
  rm -f "$etc/enroot/hooks.d/10-cgroups.sh"
  cat >>"$etc/enroot/enroot.conf" <<'END'
ENROOT_RUNTIME_PATH /tmp/enroot-$(id -u)/run
ENROOT_CACHE_PATH   /tmp/enroot-$(id -u)/cache
ENROOT_DATA_PATH    /mnt/localssd/enroot-$(id -u)/data
ENROOT_TEMP_PATH    /tmp
END
  echo "$settings" >"$etc/enroot-settings"
  echo "required $plugin" >"$etc/plugstack.conf" # beside slurm.conf, where Slurm looks for it
}

find_pyxis() {
  local plugin
  for plugin in /usr/local/lib/slurm /usr/lib/slurm /usr/lib/*/slurm /usr/lib/*/slurm-wlm; do
    [[ ! -e $plugin/spank_pyxis.so ]] || { echo "$plugin/spank_pyxis.so"; break; }
  done
}

enroot_settings() { # -> the folder with enroot.conf, as enroot was built
  local program
  program=$(command -v enroot) || return 0
  sed -n 's/^config::export ENROOT_SYSCONF_PATH *"\(.*\)"/\1/p' "$program"
}

# Paths that every machine must see (etc/visible), and private folders above them (etc/covers): often the checkout or
# the Python of its .venv is in a home folder that other users cannot read. Such a folder is covered inside the machines
# and unchanged on the host.
write_paths() {
  local path blocker
  {
    echo "$CHECKOUT"
    echo "$STATE"
    if [[ -e $CHECKOUT/.venv/bin/python ]]; then
      readlink -f "$CHECKOUT/.venv"
      dirname "$(dirname "$(readlink -f "$CHECKOUT/.venv/bin/python")")"
      dirname "$(sed -n 's/^home *= *//p' "$CHECKOUT/.venv/pyvenv.cfg")" # the same, unless a symbolic link leads there
    fi
    # In another folder if the checkout is a git worktree.
    git -C "$CHECKOUT" rev-parse --path-format=absolute --git-common-dir 2>/dev/null || true
  } >"$STATE/etc/visible"
  while read -r path; do
    blocker=$(blocking_ancestor "$path")
    [[ -z $blocker ]] || echo "$blocker"
  done <"$STATE/etc/visible" | sort -u >"$STATE/etc/covers"
}

blocking_ancestor() { # PATH -> the first folder above it that the user cannot pass
  # shellcheck disable=SC2016  # the inner shell expands these
  as_user bash -c '
    IFS=/ read -r -a parts <<<"${1#/}"
    for part in "${parts[@]::${#parts[@]}-1}"; do
      ancestor+=/$part
      [[ -x $ancestor ]] || { echo "$ancestor"; break; }
    done' bash "$1"
}

as_user() { setpriv --reuid "$OUR_USER" --regid "$OUR_USER" --init-groups --inh-caps=-all -- "$@"; }

write_home() {
  local home=$STATE/home
  mkdir -p "$home/.config/ftkit/clusters"
  cp "$PARTS/cluster-profile.yaml" "$home/.config/ftkit/clusters/dev.yaml"
  [[ ! -e $STATE/etc/plugstack.conf ]] ||
    cp "$PARTS/containers-profile.yaml" "$home/.config/ftkit/clusters/dev-pyxis.yaml"
  printf 'cluster: dev\nworkspace: %s\n' "$STATE/shared" >"$home/.config/ftkit/config.yaml"
  # git rejects a checkout of another owner, and a login shell (`#!/bin/bash -l` in a job) resets PATH.
  printf '[safe]\n\tdirectory = %s\n' "$CHECKOUT" >"$home/.gitconfig"
  printf 'export PATH=%q SLURM_CONF=%q\n' "$(user_path)" "$STATE/etc/slurm.conf" >"$home/.profile"
  chown -R "$OUR_USER:" "$home"
}

user_path() { echo "$CHECKOUT/.venv/bin:$SYSTEM_PATH"; }
