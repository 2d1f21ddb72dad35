"""litellm against a running server: `python tests/works_with/litellm_calls.py [URL]`.

Not part of the suites: litellm brings some 300 MB. Prints what it got; ends with status 1 if that
isn't what it should be.
"""

import sys

import litellm  # pyright: ignore[reportMissingImports]

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    server = {"api_base": f"{url}/v1", "api_key": "none"}
    chat = {"model": f"hosted_vllm/{MODEL}", "messages": QUESTION, "temperature": 0, **server}
    whole = litellm.completion(**chat)
    stream = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        max_tokens=2,
        temperature=0,
        **server,
    )
    try:
        litellm.completion(model="openai/absent", messages=QUESTION, **server)
        absent = "answered"
    except litellm.NotFoundError:
        absent = "NotFoundError"
    answer = whole.choices[0].message.content
    print(f"chat: {answer} ({whole.usage.total_tokens} tokens)")
    print(f"stream: {''.join(chunks)}")
    print(f"text: {text.choices[0].text!r}")
    print(f"a model that is not there: {absent}")
    is_right = "Paris" in answer and "".join(chunks) == answer and "Paris" in text.choices[0].text
    return 0 if is_right and absent == "NotFoundError" else 1


if __name__ == "__main__":
    sys.exit(main())
