"""What answers look like, for the description of the interface. They are not made by these: that would cost more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong, if it is one.")
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens answered by a prefix cache.")


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobsBody(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishReason | None = Field(description="Null in all but a sample's last event.")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(default=None, description="If asked for.")


class Completion(BaseModel):
    """Also each event of a stream; then `usage` is there if it was asked for, and null in all but the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenTokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="Null if there are only tool calls.")
    refusal: None
    tool_calls: list[ToolCall] | None = Field(default=None, description="If there are any.")


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(default=None, description="If asked for.")


class FunctionDelta(BaseModel):
    name: str | None = Field(default=None, description="In the first event of a call.")
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = Field(default=None, description="In the first event of a call, as is the type.")
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(BaseModel):
    """An event of a stream; `usage` is there if it was asked for, and null in all but the last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChosenTokenLogprob]


class OutputMessage(BaseModel):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Input tokens answered by a prefix cache.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(BaseModel):
    """A response. What the request said is told again."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Literal["none"] | None]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """An event of a stream, in the order that OpenAI's clients expect; more fields go by the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(
        description="Tokens of prompt and output together; null while no worker serves."
    )


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["serving", "not serving"]


class Version(BaseModel):
    version: str
