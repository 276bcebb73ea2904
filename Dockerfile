# The daemon's image; docs/install/container.md says how to build and run it.
ARG BASE=debian:12-slim

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3-dev python3-venv
COPY . /src
# daemon-cuda12 or daemon-cuda13 for nodes with GPUs: much larger, and tried nowhere yet
ARG EXTRA=daemon-cpu
# What the daemon does not use goes: a benchmark, tests, and pip itself. Libraries in wheels cannot be stripped: auditwheel
# has moved their segments.
RUN python3 -m venv /opt/kvprefetch \
    && /opt/kvprefetch/bin/pip install --no-cache-dir "/src[$EXTRA]" \
    && cd /opt/kvprefetch/lib/python3*/site-packages \
    && rm -rf mooncake/transfer_engine_bench numpy/tests numpy/*/tests numpy/_core/include \
    && /opt/kvprefetch/bin/kvprefetchd --version \
    && /opt/kvprefetch/bin/pip uninstall -y setuptools pip

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && groupadd --gid 970 kvprefetch && useradd --uid 970 --gid 970 --no-create-home --home-dir /run/kvprefetch kvprefetch \
    && install -d -o 970 -g 970 /run/kvprefetch
COPY --from=build /opt/kvprefetch /opt/kvprefetch
ENV PATH=/opt/kvprefetch/bin:$PATH PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.title="kvprefetchd" \
    org.opencontainers.image.description="Starts fetching a waiting vLLM request's KV cache from a Mooncake store when the request arrives" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="https://github.com/kvprefetch/kvprefetch"
USER 970:970
EXPOSE 9655
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["kvprefetchd", "health"]
ENTRYPOINT ["kvprefetchd"]
CMD ["serve"]
