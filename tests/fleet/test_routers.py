"""Unmodified routers over servers that tell which blocks they hold: Dynamo's indexer and selection service, and
vllm-router with prefill on one server and decode on another.

CELLAR is the program with the feature `kv-events`; DYNAMO_PYTHON is a Python with
ai-dynamo-runtime, VLLM_ROUTER the router."""

import os
import shutil
import tempfile
import time
import unittest

from servers import Program, Server, ask, completion, free_port

BLOCK = 16
PROMPT = "Once upon a time there was a little girl. She had a big red ball and a small brown dog. " * 6


def until(condition, seconds=20):
    """Waits until it holds: events take a moment."""
    end = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return result


class Events(unittest.TestCase):
    def server(self, *flags):
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        server = Server("-t", "1", "--kv-events", events, "--kv-events-replay", replay, *flags)
        self.addCleanup(server.close)
        server.events, server.replay = events, replay
        return server

    def program(self, *command, path="/health"):
        port = free_port()
        program = Program([*command, "--port", str(port)], port, path)
        self.addCleanup(program.close)
        return program

    def tokens(self, server, prompt=PROMPT):
        status, answer = ask(server.port, "POST", "/v1/completions/render", {"prompt": prompt, "max_tokens": 8})
        self.assertEqual(status, 200, answer)
        return answer[0]["token_ids"]


@unittest.skipUnless(os.environ.get("DYNAMO_PYTHON"), "DYNAMO_PYTHON is not set")
class Dynamo(Events):
    def indexer(self, *flags):
        return self.program(os.environ["DYNAMO_PYTHON"], "-m", "dynamo.indexer", *flags)

    def held(self, indexer, tokens):
        """How many of the first tokens each server holds."""
        body = {"token_ids": tokens, "model_name": "stories"}
        status, answer = ask(indexer.port, "POST", "/query", body)
        self.assertEqual(status, 200, answer)
        return {int(name): of["0"] for name, of in answer["scores"].items()}

    def test_the_indexer_knows_the_blocks(self):
        servers = [self.server("-c", "4096") for _ in range(2)]
        workers = ",".join(f"{at + 1}={server.events}" for at, server in enumerate(servers))
        indexer = self.indexer("--block-size", str(BLOCK), "--model-name", "stories", "--workers", workers)
        tokens = self.tokens(servers[0])
        # A subscriber needs a moment to be one.
        time.sleep(1)
        completion(servers[0].port, PROMPT, 8)
        half = PROMPT[: len(PROMPT) // 2]
        completion(servers[1].port, half, 8)
        common = [a == b for a, b in zip(tokens, self.tokens(servers[0], half))]
        n_half = (common + [False]).index(False)
        whole = {1: len(tokens) // BLOCK * BLOCK, 2: n_half // BLOCK * BLOCK}
        self.assertTrue(until(lambda: self.held(indexer, tokens) == whole), (self.held(indexer, tokens), whole))
        self.assertEqual(self.held(indexer, [9] * 64), {})
        status, answer = ask(indexer.port, "POST", "/query", {"token_ids": tokens, "model_name": "other"})
        self.assertEqual(status, 404, answer)
        self.assertNotIn("Failed to decode", indexer.said())

    def test_evicted_blocks_are_gone(self):
        server = self.server("-c", "300")
        indexer = self.indexer("--block-size", str(BLOCK), "--model-name", "stories", "--workers", f"1={server.events}")
        tokens = self.tokens(server)
        time.sleep(1)
        completion(server.port, PROMPT, 8)
        self.assertTrue(until(lambda: self.held(indexer, tokens).get(1) == len(tokens) // BLOCK * BLOCK))
        for number in range(3):
            completion(server.port, f"Number {number} of many others, which all are new. " * 9, 8)
        self.assertTrue(until(lambda: self.held(indexer, tokens).get(1, 0) < BLOCK), self.held(indexer, tokens))

    def test_a_late_subscriber_asks_for_what_it_missed(self):
        server = self.server("-c", "4096")
        completion(server.port, PROMPT, 8)
        indexer = self.indexer()
        body = {"instance_id": 1, "endpoint": server.events, "replay_endpoint": server.replay,
                "model_name": "stories", "block_size": BLOCK}
        status, answer = ask(indexer.port, "POST", "/register", body)
        self.assertEqual(status, 201, answer)
        time.sleep(1)
        # It sees the gap with the next events.
        completion(server.port, "A dog. " * 40, 8)
        tokens = self.tokens(server)
        whole = {1: len(tokens) // BLOCK * BLOCK}
        self.assertTrue(until(lambda: self.held(indexer, tokens) == whole), indexer.said())

    def test_the_service_selects_the_server_with_the_prefix(self):
        servers = [self.server("-c", "4096") for _ in range(2)]
        service = self.program(os.environ["DYNAMO_PYTHON"], "-m", "dynamo.select_service")
        for at, server in enumerate(servers):
            body = {"worker_id": at + 1, "model_name": "stories", "endpoint": f"http://127.0.0.1:{server.port}",
                    "block_size": BLOCK, "kv_events_endpoint": server.events,
                    "kv_events_endpoints": {"0": server.events}, "data_parallel_size": 1,
                    "max_num_batched_tokens": 512, "total_kv_blocks": 256}
            status, answer = ask(service.port, "POST", "/workers", body)
            self.assertEqual(status, 201, answer)
        time.sleep(1)
        completion(servers[1].port, PROMPT, 8)
        tokens = self.tokens(servers[1])

        def selected():
            return ask(service.port, "POST", "/select", {"model_name": "stories", "token_ids": tokens})

        wanted = f"http://127.0.0.1:{servers[1].port}"
        self.assertTrue(until(lambda: wanted in str(selected()[1])), selected())


@unittest.skipUnless(os.environ.get("VLLM_ROUTER"), "VLLM_ROUTER is not set")
class PrefillAndDecode(unittest.TestCase):
    def test_the_router_sends_a_prompt_from_one_to_the_other(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        flags = ("-c", "4096", "-t", "1", "--cache-dir", os.path.join(folder, "cache"))
        prefill, decode = Server(*flags), Server(*flags)
        alone = Server("-c", "4096", "-t", "1")
        for server in (prefill, decode, alone):
            self.addCleanup(server.close)
        port = free_port()
        command = [os.environ["VLLM_ROUTER"], "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation",
                   "--prefill", f"http://127.0.0.1:{prefill.port}", "--decode", f"http://127.0.0.1:{decode.port}",
                   "--policy", "round_robin", "--prometheus-port", str(free_port())]
        router = Program(command, port, "/health")
        self.addCleanup(router.close)
        n_prompts = 0
        for number in range(6):
            prompt = f"Number {number}. {PROMPT}"
            text, n_prompt, _ = completion(port, prompt, 24)
            self.assertEqual(text, alone.complete(prompt, 24)[0])
            n_prompts += n_prompt
        # The router's usage is that of the first server. The second one computes what it would have to wait for longer:
        # some, where the machine is busy.
        restored = decode.metric("cellar_restored_tokens_total")
        self.assertGreater(restored, 0)
        print(f"vllm-router: {restored:.0f} of {n_prompts} tokens were computed by one and continued by another")
        self.assertGreater(prefill.metric("cellar_requests_total"), 0)
        self.assertGreater(decode.metric("cellar_requests_total"), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
