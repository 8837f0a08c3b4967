# An image for GPU nodes (docs/cluster.md has the job scripts' CONTAINER=):
#
#   docker build -t head-schedules .
#   docker run --gpus all --shm-size=1g --ulimit memlock=-1 \
#       -v "$PWD/runs:/models/runs" -v "$PWD/data:/models/data" head-schedules \
#       deepspeed --module pretrain.main --config 124m --data data/fineweb
#
# nvcc and g++ are there for DeepSpeed's own kernels, which are compiled at first use. The driver's CUDA must
# be at least that of torch. Its RUN steps, with a run and an export after them, were last tried in an empty root
# of Ubuntu 24.04 (debootstrap), without CUDA, on 2026-11-25: 5.9 GB, torch 2.13.0+cu130.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git make pdsh openssh-client python3 python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
COPY . /opt/head-schedules
RUN python3 -m venv /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir --constraint /opt/head-schedules/constraints.txt \
        '/opt/head-schedules[all,s3]'
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /models
CMD ["head-schedules", "--help"]
