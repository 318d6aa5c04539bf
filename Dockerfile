# The server for CPUs, in a container: see docs/howto/containers.md.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
WORKDIR /src
COPY constraints.txt .
RUN python -m venv /opt/pagoda
# PyTorch's own index has builds for CPUs alone, which are a tenth as large as those on PyPI.
RUN /opt/pagoda/bin/pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY . .
RUN make wheel
RUN /opt/pagoda/bin/pip install --no-cache-dir --constraint constraints.txt "$(echo dist/*.whl)[serve]"

FROM python:${PYTHON}-slim
RUN useradd --uid 1000 --create-home pagoda && install --directory --owner pagoda --group pagoda /home/pagoda/.cache
COPY --from=build /opt/pagoda /opt/pagoda
USER 1000
ENV PATH=/opt/pagoda/bin:$PATH
# Models, also those of the hub's own cache.
VOLUME /home/pagoda/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["pagoda"]
CMD ["serve", "--host", "0.0.0.0"]
