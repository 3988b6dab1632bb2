# Every training image: an NVIDIA base, locked packages, ftkit. Built by `ftkit build NAME:TAG`, which adds the
# image's own variables and labels at the end. Steps that images of one release share come first, so that building
# a second image takes seconds. Only instructions of docker's classic builder, which every engine has (docs/adr/0010).
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

# The base's packages, to verify afterwards that no relevant package was replaced.
RUN mkdir -p /opt/ftkit && python3 -m pip list --format=freeze >/opt/ftkit/base-packages.txt

# --no-deps: the lock is complete, and nothing else may be installed. PIP_CONSTRAINT is emptied because the
# base's constraints have no hashes. Certificates are copied only if the build's site needs its own.
COPY requirements.lock certificates* /opt/ftkit/
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT
RUN PIP_CONSTRAINT= PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install \
    --no-deps --require-hashes --no-build-isolation \
    --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    --requirement /opt/ftkit/requirements.lock

COPY *.whl /opt/ftkit/
RUN PIP_CONSTRAINT= PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install \
    --no-deps --no-index --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    /opt/ftkit/*.whl \
    && python3 -m ftkit.images.inside --sbom /opt/ftkit/sbom.cdx.json

COPY image.json /opt/ftkit/
ENV PYTHONUNBUFFERED=1
