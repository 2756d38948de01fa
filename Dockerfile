# The Holdfast service. Settings come from the environment: docs/settings.md.
FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY service service
COPY trainer_sdk trainer_sdk
COPY migrations migrations
RUN python -m venv /opt/holdfast && /opt/holdfast/bin/pip install --no-cache-dir ".[service]"

FROM python:3.12-slim
COPY --from=build /opt/holdfast /opt/holdfast
# Not root: the service needs nothing but its data folder.
RUN useradd --system --uid 8400 --create-home --home-dir /var/lib/holdfast holdfast
USER holdfast
ENV PATH=/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOLDFAST_HOST=0.0.0.0 \
    HOLDFAST_PORT=8400 \
    HOLDFAST_DATA_DIR=/var/lib/holdfast/data
EXPOSE 8400
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8400/readyz', timeout=4)"]
CMD ["holdfast", "serve"]
