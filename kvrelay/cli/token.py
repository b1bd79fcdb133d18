"""`kvrelay token`: what lets a tenant in."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.tenants import Role

app = typer.Typer(
    help="Make tokens for tenants.",
    epilog="Example: kvrelay token new --tenant acme > acme.token",
    no_args_is_help=True,
)


@app.command()
@requires_cluster_extra
def new(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Who it is for.")],
    role: Annotated[
        Role,
        typer.Option(
            help="client asks for answers, monitor reads /metrics and /status.json, admin operates "
            "the cluster."
        ),
    ] = "client",
) -> None:
    """Make a random token.

    It is printed once, on stdout, and kept nowhere. Its line for the file that security.tokens_file
    names goes to stderr: a cluster needs its hash only.

    Example: kvrelay token new --tenant acme > acme.token
    """
    from kvrelay.config.tokens_file import TenantEntry, digest_of, new_token

    token = new_token()
    try:
        entry = TenantEntry(name=tenant, tokens_sha256=(digest_of(token),), roles=(role,))
    except ValueError:
        raise typer.BadParameter(
            f"--tenant {tenant!r:.80} is not a name: letters, digits, '.', '_' and '-'."
        ) from None
    print(token)
    line = f"  - {{name: {entry.name}, roles: [{role}], tokens_sha256: [{entry.tokens_sha256[0]}]}}"
    typer.echo(
        "# under `tenants:` in the tokens file, or the hash beside the tenant's others:", err=True
    )
    typer.echo(line, err=True)


@app.callback()
def _group() -> None:
    """One command so far, and still by its name."""
