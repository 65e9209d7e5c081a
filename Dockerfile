# fedsim as three images; DEPLOY.md ("In containers") and docs/start.md say how each is used.
#   docker build --target simulation -t fedsim .
#   docker build --target server -t fedsim-server .
#   docker build --target site -t fedsim-site .
# TORCH_INDEX: pip's index of PyTorch's CPU builds, which save 5 GB. EXTRAS: optional parts, as in pyproject.toml.
FROM python:3.12-slim-bookworm AS base
ARG TORCH_INDEX=""
ARG EXTRAS="ray,export"
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 HOME=/tmp
WORKDIR /opt/fedsim
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY fedsim fedsim
COPY strategies strategies
COPY clients clients
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; fi \
    && pip install --no-cache-dir ".[$EXTRAS]" \
    && rm -rf /opt/fedsim
# Another user may be given (docker run --user, FEDSIM_USER of compose.yaml): the one who owns the kit or the outputs.
USER 1000:1000

FROM base AS simulation
WORKDIR /work
ENTRYPOINT ["fedsim"]
CMD ["--help"]

FROM base AS server
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/*
USER 1000:1000
WORKDIR /federation/server
CMD ["./start.sh", "--foreground"]

FROM base AS site
WORKDIR /kit
CMD ["./start.sh", "--foreground"]
