"""Who is let in: by a key, or because there are none and only this machine reaches the server."""

from chunkweave.errors import UsageError
from chunkweave.server.keys import ANONYMOUS, KeyRing, Tenant
from chunkweave.server.refusals import RefusalError
from chunkweave.server.settings import ListenSettings


def tenant_of(keys: KeyRing, key: str | None) -> Tenant:
    """Whose request it is that presents `key`.

    Raises:
        RefusalError: 401, a key is needed, and this is none.
    """
    if not len(keys):
        return ANONYMOUS
    tenant = None if key is None else keys.find(key)
    if tenant is None:
        told = "give an API key as `Authorization: Bearer KEY`" if key is None else "no such API key"
        raise RefusalError(401, told, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return tenant


def refuse_open_door(listen: ListenSettings, keys: KeyRing) -> None:
    """Refuse to serve everybody on a network by accident.

    Raises:
        UsageError: there are no keys, other machines reach the address, and nobody said that they may.
    """
    if not len(keys) and not listen.loopback and not listen.allow_anonymous:
        raise UsageError(
            f"{listen.host} can be reached from other machines: give API keys (keys_file, CHUNKWEAVE_API_KEYS), "
            f"or allow_anonymous if everybody there may use the server"
        )
