#!/usr/bin/env bash
# Import an image with enroot. Arguments: the file, the exact address, the address for releases without support for
# digests, the hexadecimal digest of the image's configuration, those of its layers as `BLOB:CONTENT`, a temporary folder.
#
# enroot compares each blob that it downloads with its digest, and keeps it in its cache under that digest: layers
# recompressed with zstd, the configuration unchanged. It does not compare the manifest with the requested digest. The
# cache is empty at first: what is in it afterwards is what the file was made from, even if a tag moved meanwhile.
set -eu
output=$1 uri=$2 config=$4 layers=$5
wrong_image=65 wrong_layers=66 has_devices=67 # ftkit.images.enroot explains them
case $(enroot version) in [0-3].*) uri=$3 ;; esac
export ENROOT_CACHE_PATH=$6/cache
(umask 077 && mkdir -p -- "$ENROOT_CACHE_PATH")
enroot import --output "$output" -- "$uri"
if [ -n "$config" ]; then
    expected=$({ echo "$config"; for layer in $layers; do echo "${layer%:*}"; done; } | sort -u)
    # shellcheck disable=SC2012 # names are digests
    [ "$(ls "$ENROOT_CACHE_PATH" | sort)" = "$expected" ] || exit "$wrong_image"
    for layer in $layers; do
        found=$(zstd -d -c -q -- "$ENROOT_CACHE_PATH/${layer%:*}" | sha256sum)
        [ "${found%% *}" = "${layer#*:}" ] || exit "$wrong_layers"
    done
fi
if command -v unsquashfs >/dev/null && unsquashfs -lls "$output" | grep '^[bc]'; then exit "$has_devices"; fi
