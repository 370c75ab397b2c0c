"""The server that one would write in an afternoon: FastAPI, the model, a flat faiss index. No limits, no batches.

python benchmarks/serve_plain.py RUN
"""

import socket
import sys

import faiss
import torch
import uvicorn
from fastapi import FastAPI

from habitus.model import batch_tensors
from habitus.serving import Retriever, pack_histories

retriever = Retriever.open(sys.argv[1], device="cpu", index="exact", read_only=True)
table = retriever.candidates.trained_vectors[0]
index = faiss.IndexFlatIP(table.shape[1])
index.add(table.numpy())
app = FastAPI()


@app.post("/v1/recommend")
def recommend(body: dict) -> dict:  # type: ignore[type-arg]
    history = retriever.encode_history(body["history"])
    batch, windows, slots = pack_histories([history], retriever.encoder.fields)
    with torch.no_grad():
        queries = retriever.bundle.model.queries(batch_tensors(batch), table[torch.from_numpy(batch.items)])
    scores, rows = index.search(queries[torch.from_numpy(windows), torch.from_numpy(slots)].numpy(), body["k"])
    ids = retriever.candidates.ids_at(rows[0].tolist())
    return {"items": [{"item_id": i, "score": float(s)} for i, s in zip(ids, scores[0], strict=True)]}


listening = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
