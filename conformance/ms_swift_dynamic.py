"""ms-swift with dynamic numbers of samples, which it runs in chunks of rows, of one row here."""

from __future__ import annotations

from ms_swift import SOURCE, TRAINER, MsSwift


class Chunked(MsSwift):
    name = f"ms-swift {SOURCE.version}, in chunks"
    lacks = ("uneven groups", "rows that pad a batch", "packed rows", "slices of the context")
    chunk = 1
    where = MsSwift.where | {
        "token-mean": SOURCE.where(TRAINER, "losses.append(chunk_loss * chunk_weight)"),
    }


adapter = Chunked()
