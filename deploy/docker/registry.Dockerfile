# The registry service: no torch. Build from the repository's root:
#   docker build -f deploy/docker/registry.Dockerfile -t loraplex-registry .
# A release gives BASE with its digest, as it gives the images' to kustomize.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md deploy/docker/registry.lock ./
COPY loraplex loraplex
COPY shared shared
COPY registry_service registry_service
COPY inference_service/__init__.py inference_service/__init__.py
COPY kernels/__init__.py kernels/__init__.py
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir --require-hashes -r registry.lock \
    && /opt/loraplex/bin/pip install --no-cache-dir --no-deps --no-build-isolation -c constraints.txt '.[tracing]'

FROM ${BASE}
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/loraplex \
    TMPDIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/loraplex
USER 65532:65532
EXPOSE 50051 50053
ENTRYPOINT ["python", "-m", "registry_service"]
CMD ["serve", "--listen=0.0.0.0:50051"]
