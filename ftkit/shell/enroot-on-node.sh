#!/usr/bin/env bash
# Import on a compute node. Arguments: a folder on the node's local disk, the text of the import's script, its arguments
# but the last. Programs of the import put their temporary folders there: shared file systems can't store overlayfs
# whiteouts.
#
# The import runs in the background, because bash handles a signal only after its foreground program has ended, and Slurm
# kills after KillWait. It is killed immediately, so that nothing writes into a folder that is being removed. Programs in
# other process groups get the signal from Slurm, and end a moment later: hence several attempts to remove the folder.
# The next import on that node removes what a killed one left.
set -eu
disk=$1 mine=ftkit-import-$UID-$HOSTNAME
shift
folder=$disk/$mine-$$ import='' code=''
clean() {
    trap '' TERM INT HUP
    [ -z "$import" ] || kill -KILL -- "-$import" 2>/dev/null || true
    for _ in $(seq 100); do rm -rf -- "$folder" 2>/dev/null && break; sleep 0.1; done
}
trap 'code=$?; clean; [ "$code" = 143 ] || echo ftkit-import-ended' EXIT
trap 'exit 143' TERM INT HUP
mkdir -p -- "$disk"
for left in "$disk/$mine"-*; do
    kill -0 "${left##*-}" 2>/dev/null || rm -rf -- "$left" || true
done
(umask 077 && mkdir -- "$folder" "$folder/temp")
export ENROOT_TEMP_PATH=$folder/temp
set -m
bash -c "$@" "$folder" &
import=$!
set +m
wait "$import"
