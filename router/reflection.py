"""Server reflection, in the version that tools ask for first (v1) and the one before it (v1alpha).

grpcio-reflection has v1alpha alone. The messages of v1 are the same on the wire, under the name of another package.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")
SERVICES = (V1, V1ALPHA)


def serve_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Describe these services (``package.Service``, of the default pool), and reflection itself."""
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES), pool=_pool(services))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method}),))


def _pool(services: Sequence[str]) -> DescriptorPool:
    """What is described, and nothing else that this process knows of. Of the details of errors, too, so that tools
    can show them."""
    pool, added = DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for needed in file.dependencies:
            add(needed)
        pool.AddSerializedFile(file.serialized_pb)

    for service in services:
        add(Default().FindServiceByName(service).file)
    for file in (error_details_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        add(file)
    description = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    renamed = text_format.MessageToString(description).replace("v1alpha", "v1")
    pool.AddSerializedFile(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()).SerializeToString())
    return pool
