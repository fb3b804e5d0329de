"""What handlers depend on: the tenant that the gate let in, and the parts of the server."""

from collections.abc import Iterable
from typing import Annotated, Protocol

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from chunkweave.server.corpora import Corpora
from chunkweave.server.keys import Tenant
from chunkweave.server.service import Parts, Service

_scheme = HTTPBearer(auto_error=False, description="An API key, if the server was given any.")


class Forgetful(Protocol):
    """Removes the KV of chunks."""

    async def forget(self, tenant: Tenant, texts: Iterable[str], cache_salt: str = "") -> int:
        """Of a tenant's chunks, from every tier; returns how many copies of segments there were."""


class WithCorpora(Protocol):
    """The parts of a server that has corpora."""

    @property
    def corpora(self) -> Corpora:
        """Those of all tenants."""

    @property
    def answering(self) -> Forgetful:
        """Told which chunks are gone."""


def service_of(request: Request) -> Service:
    """The service that the app was made for."""
    service: Service = request.app.state.service
    return service


def parts_of(request: Request) -> Parts:
    """The parts of a server that is ready."""
    return service_of(request).require_ready()


def tenant_of(request: Request) -> Tenant:
    """Whose request it is; the gate has found out."""
    tenant: Tenant = request.state.tenant
    return tenant


AnyService = Annotated[Service, Depends(service_of)]
ReadyParts = Annotated[Parts, Depends(parts_of)]
CorpusParts = Annotated[WithCorpora, Depends(parts_of)]
OfTenant = Annotated[Tenant, Depends(tenant_of)]
NEEDS_KEY = [Security(_scheme)]
"""For routers whose endpoints need a key; declares it in the schema, the gate enforces it."""
