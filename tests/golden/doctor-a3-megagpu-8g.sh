#!/usr/bin/env bash
# Checks nodes. Written by 'ftkit doctor'; salloc runs it on the machine where the command was typed.
set -euo pipefail

readonly RUN_DIR=/shared/ftkit/checks
readonly RUN_PYTHON=python3
readonly WORKSPACE=/shared/ftkit

say() {
    printf 'ftkit: %s\n' "$*" >&2
}

# --- Environment ---------------------------------------------------------------------------------
# pyxis passes the whole environment of the submitting shell into the container, where these would
# mix the host's programs and libraries with the image's.
unset BASH_ENV LD_LIBRARY_PATH LD_PRELOAD PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONUSERBASE TMPDIR
unset VIRTUAL_ENV "${!CONDA_@}"
# enroot's login shell would reset the image's PATH.
export ENROOT_LOGIN_SHELL=no

export PYTHONUNBUFFERED=1
unset PYTHONOPTIMIZE # transformers reads docstrings
export OMP_NUM_THREADS=1
# Otherwise threads spin for milliseconds before they sleep, and take the CPU from the thread that they wait for.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

# Caches of compiled kernels: on each node's own disk, kept between jobs.
export FTKIT_CACHE_DIR=/mnt/localssd/ftkit-"$UID"
export TRITON_CACHE_DIR="$FTKIT_CACHE_DIR/triton"
export TORCHINDUCTOR_CACHE_DIR="$FTKIT_CACHE_DIR/inductor"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="$FTKIT_CACHE_DIR/flash-attn"
export XDG_CACHE_HOME="$FTKIT_CACHE_DIR/cache"

# Weights and data from the hub: on the shared file system, for all nodes and runs. The token of
# `hf auth login` is in the submitting shell's HF_HOME, so it is read before HF_HOME is set.
hub_token=${HF_TOKEN_PATH:-${HF_HOME:-${HOME:-}/.cache/huggingface}/token}
if [[ -z ${HF_TOKEN:-} ]]; then
    HF_TOKEN=${HUGGING_FACE_HUB_TOKEN:-}
    if [[ -z $HF_TOKEN && -r $hub_token ]]; then
        HF_TOKEN=$(<"$hub_token")
    fi
    if [[ -n $HF_TOKEN ]]; then
        export HF_TOKEN
    fi
fi
export HF_HOME="${HF_HOME:-$WORKSPACE/huggingface}"

# The site's NCCL settings for the network between nodes.
export NCCL_LIB_DIR=/var/lib/tcpxo/lib64
export NCCL_FASTRAK_CTRL_DEV=enp0s12
export NCCL_FASTRAK_IFNAME=enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0
export NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY=/dev/aperture_devices
export NCCL_SOCKET_IFNAME=enp0s12
export GLOO_SOCKET_IFNAME=enp0s12
export FTKIT_LIBRARY_DIR=/var/lib/tcpxo/lib64
export FTKIT_NCCL_PROFILE=/var/lib/tcpxo/lib64/nccl-env-profile.sh # sourced on the nodes, not here

# --- Rendezvous ----------------------------------------------------------------------------------
# Resolved outside the container, which has no scontrol.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
readonly MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # below Linux's ephemeral ports

# Prints the first port from this one on that nothing listens on. It is passed to all tasks of the step.
find_port() { # HOST PORT
    local port=$2
    # shellcheck disable=SC2016
    while ((port < $2 + 100)) && timeout 5 bash -c ': <"/dev/tcp/$0/$1"' "$1" "$port" 2>/dev/null; do
        port=$((port + 10)) # the checks of nodes use several
    done
    ((port == $2)) || say "port $2 of $1 is taken: using $port"
    printf '%s' "$port"
}

# --- Tasks ---------------------------------------------------------------------------------------
readonly CONTAINER_IMAGE=/shared/ftkit/images/olmo3+25.02.sqsh
export FTKIT_CONTAINER_IMAGE=$CONTAINER_IMAGE # recorded by the trainer
if [[ ! -f $CONTAINER_IMAGE ]]; then
    say "error: the container image $CONTAINER_IMAGE does not exist on $HOSTNAME"
    say "import it first, to a file system that all nodes share; or choose another one with --image"
    exit 4
fi

container_mounts=(
    /var/tmp:/var/tmp
    /shared/ftkit:/shared/ftkit
    /mnt/localssd:/mnt/localssd
    /var/lib/tcpxo/lib64:/var/lib/tcpxo/lib64
)
if [[ $HF_HOME/ != "$WORKSPACE"/* ]]; then
    container_mounts+=("$HF_HOME:$HF_HOME")
fi
mkdir -p -- "$HF_HOME"

# In a container, variables of the image override those of the job unless they are listed here.
container_env=(
    FLASH_ATTENTION_CUTE_DSL_CACHE_DIR
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED
    OMP_NUM_THREADS
    OMP_WAIT_POLICY
    PYTHONUNBUFFERED
    TORCHINDUCTOR_CACHE_DIR
    TRITON_CACHE_DIR
    XDG_CACHE_HOME
    "${!FTKIT_@}"
    "${!GLOO_@}"
    "${!HF_@}"
    "${!MLFLOW_@}"
    "${!NCCL_@}"
    "${!WANDB_@}"
)

join() {
    local IFS=$1
    shift
    printf '%s' "$*"
}

# Each srun creates its own container and removes it. A named container would start faster the
# second time, but would stay on the nodes of sites that keep named containers after a job.
srun_options=(
    --ntasks-per-node=1
    --cpu-bind=none # sites that bind by default would bind a node's only task to one core
    --export=ALL
    --kill-on-bad-exit=1
    --wait=60
    --mpi=none
    --no-container-mount-home
    --container-writable
    --container-image="$CONTAINER_IMAGE"
    --container-mounts="$(join , "${container_mounts[@]}")"
    --container-workdir="$RUN_DIR"
    --container-env="$(join , "${container_env[@]}")"
)

# The check of a node exits with 0 even if the node is unhealthy. If it can't run at all, HOST.absent tells the other
# nodes not to wait for it.
check_node() { # HOST FOLDER OPTION...
    # shellcheck disable=SC2016
timeout --kill-after=10 300 srun --nodes=1 --ntasks=1 --nodelist="$1" "${srun_options[@]}" \
        bash -c "$IN_CHECK"'exec "$0" -m ftkit.health --in-job "$@"' "$RUN_PYTHON" \
        --host="$1" \
        --absent-dir="$2" \
        --port="$check_port" \
        --device=cuda \
        --num-devices=8 \
        --gpu=h100-80gb \
        --network-gbps=1600.0 \
        --local-dir="$FTKIT_CACHE_DIR" \
        "${@:3}" || : >"$2/$1.absent"
}

# Each node is checked in a separate job step, so that a container that does not start can't end the other checks.
# The checks rendezvous by themselves. A node's output is in FOLDER/HOST.out, the errors of its step in FOLDER/HOST.err.
check_nodes() { # FOLDER OPTION...
    local folder=$1 host hosts=${nodes//$'\n'/,} pids=() check_port
    shift
    check_port=$(find_port "${hosts%%,*}" "$((MASTER_PORT + 1))")
    mkdir -p -- "$folder"
    for host in $nodes; do
        check_node "$host" "$folder" --hosts="$hosts" "$@" >"$folder/$host.out" 2>"$folder/$host.err" &
        pids+=("$!")
    done
    wait "${pids[@]}" || true
}

# Prints why a task did not start: the last line that is not Slurm's. pyxis prints the cause as Slurm's first lines, or
# after them enroot's log; the last ones only say that a plug-in failed.
find_cause() { # FILE
    local cause
    cause=$(sed -nE 's/^(srun:|slurmstepd[^:]*:|\[[0-9T:.-]+\]) error: pyxis: +//p' "$1" |
        sed -E '/^$|^\[INFO\]|^child [0-9]+ failed|^failed to create container|^printing enroot log/d' | sed -n 1p)
    if [[ -z $cause ]]; then
        cause=$( (grep -Ev '^ *$|^(srun|slurmstepd[^:]*): |^\[[0-9T:.-]+\] error: ' "$1" || cat -- "$1") | tail -n 1)
    fi
    printf '%s' "$cause"
}

# Prints a line for each unhealthy node: its name, a tab, the reason.
list_bad_nodes() { # FOLDER
    local host verdict
    for host in $nodes; do
        verdict=$(sed -n "s/^ftkit-node $host //p" "$1/$host.out")
        if [[ -z $verdict ]]; then
            verdict=$(find_cause "$1/$host.err")
            verdict="bad the checks did not run: ${verdict:0:200}"
        fi
        if [[ $verdict != ok ]]; then
            printf '%s\t%s\n' "$host" "${verdict#bad }"
        fi
    done
}

# Start of the check on its node. Nothing is written to the node's disk, which may be full.
# shellcheck disable=SC2016
IN_CHECK='
set -eu
if [[ -f $FTKIT_NCCL_PROFILE ]]; then
    set +eu
    source "$FTKIT_NCCL_PROFILE"
    set -eu
fi
export LD_LIBRARY_PATH="$FTKIT_LIBRARY_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
'
readonly IN_CHECK

check_nodes "$RUN_DIR" --shared-file="$RUN_DIR/marker"
list_bad_nodes "$RUN_DIR" >"$RUN_DIR/bad-nodes"
