"""OpenAI's Responses API and Anthropic's Messages API over chats, by one translation.

A request becomes the body of a chat (``*_request.py``), and the deltas of its answer become blocks
(`answer_blocks`), which each API shows in its own way (``*_answer.py``). Nothing here knows models.
"""
