"""A connector of another kind, which keeps nothing: what `MultiConnector` runs beside ours."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """What one worker says to its peers."""

    port: int = 1


class StubConnector(KVConnectorBase_V1):
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Address()

    def get_num_new_matched_tokens(self, _request: Any, _computed: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, _request: Any, _blocks: Any, _tokens: int) -> None:
        pass

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, _context: Any, **_kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, _layer: str) -> None:
        pass

    def save_kv_layer(self, _layer: str, _kv: Any, _metadata: Any, **_kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
